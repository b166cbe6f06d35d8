"""The structure of the package in figures: `python tests/support/structure.py` prints them as rows of a table.

`make check` runs it with --check, which fails where the table of docs/architecture.md is out of date.
"""

from __future__ import annotations

import argparse
import ast
import io
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "flatpeak"
SMALL = 50
"""Lines below which a file counts as small."""
# Each part may import what stands in a line above its own, and itself; parts of one line do not know each other.
LAYERS: tuple[frozenset[str], ...] = (
    # The core: mathematics, models, samplers, rewards, tasks, training.
    frozenset({"kernels"}),
    frozenset({"functional"}),
    frozenset({"errors", "types"}),
    frozenset({"protocols"}),
    frozenset({"utils"}),
    frozenset({"tasks", "rollout", "rewards", "policy", "gradreg", "runs", "tracking"}),
    frozenset({"distributed", "episodes"}),
    frozenset({"evaluation"}),
    frozenset({"training"}),
    frozenset({"integrations"}),
    # Runs: from a recipe to a run directory.
    frozenset({"config"}),
    frozenset({"report"}),
    frozenset({"pipeline"}),
    # Applications, each beside the others.
    frozenset({"apps", "experiments"}),
    frozenset({"cli"}),
    frozenset({"__main__"}),
)
RANK = {package_name: rank for rank, parts in enumerate(LAYERS) for package_name in parts}
ASSEMBLY = tuple(f"flatpeak.pipeline.{name}" for name in ("build", "train", "lifecycle"))
"""The modules that put a run together, whose imports show whether its seams hold."""
SAME_ROLE = frozenset({"__init__", "build", "config"})
"""Names that mean the same in every package: its public names, how it is built, and its configuration."""


@dataclass(frozen=True, kw_only=True)
class Structure:
    """The modules of a package by dotted name, and the imports between them."""

    lines: Mapping[str, int]
    packages: frozenset[str]
    """Modules that are the `__init__` of a package."""
    imports: Mapping[str, frozenset[str]]

    @property
    def importers(self) -> dict[str, set[str]]:
        """The modules that import each module."""
        importers = defaultdict(set)
        for module, others in self.imports.items():
            for other in others - {module}:
                importers[other].add(module)
        return importers

    @property
    def single_importers(self) -> list[str]:
        """Modules that exactly one other module imports."""
        importers = self.importers
        return sorted(m for m in self.lines if m not in self.packages and len(importers[m]) == 1)

    @property
    def assembly_imports(self) -> dict[str, int]:
        """The number of modules of the package that each module of ASSEMBLY imports."""
        return {module: len(self.imports[module]) for module in ASSEMBLY if module in self.imports}

    @property
    def small(self) -> list[str]:
        """Modules of fewer than SMALL lines, packages' own aside."""
        return sorted(m for m, lines in self.lines.items() if m not in self.packages and lines < SMALL)

    @property
    def upward(self) -> list[tuple[str, str]]:
        """Imports between parts that the layers forbid."""
        return sorted(
            (module, other)
            for module, others in self.imports.items()
            if (package_name := part_of(module))
            for other in others
            if (target := part_of(other))
            if (package_name != target and RANK[target] >= RANK[package_name])
            or (app_of(module) and app_of(other) not in ("", app_of(module)))
        )

    @property
    def circles(self) -> list[list[str]]:
        """Groups of modules that import each other, however long the way round."""
        reach = {module: self._reachable(module) for module in self.lines}
        circles = {frozenset(m for m in reach[module] if module in reach[m]) for module in self.lines}
        return sorted(sorted(group) for group in circles if len(group) > 1)

    def _reachable(self, start: str) -> set[str]:
        seen: set[str] = set()
        waiting = [start]
        while waiting:
            for other in self.imports[waiting.pop()] - seen:
                seen.add(other)
                waiting.append(other)
        return seen

    @property
    def ambiguous(self) -> dict[str, list[str]]:
        """Module names that mean different things in different packages.

        A task and its own reward may share one, and a command may be named as what it runs.
        """
        by_name = defaultdict(list)
        for module in self.lines:
            if module not in self.packages and part_of(module) != "cli":
                by_name[module.rpartition(".")[2]].append(module)
        for package in self.packages - {"flatpeak"}:
            by_name[package.rpartition(".")[2]].append(package)
        return {
            name: sorted(modules)
            for name, modules in sorted(by_name.items())
            if name not in SAME_ROLE and len(modules) > 1 and {part_of(m) for m in modules} != {"tasks", "rewards"}
        }


def part_of(module: str) -> str:
    """`flatpeak.rewards.math.units` is in `rewards`; the package itself is in none."""
    return module.split(".")[1] if "." in module else ""


def app_of(module: str) -> str:
    """`flatpeak.apps.publish.push` is of the application `publish`; what is of none has an empty name."""
    names = module.split(".")
    return names[2] if len(names) > 2 and names[1] == "apps" else ""


def imports(source: str, *, typing_only: bool = True) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import, inside functions too; `typing_only` includes those under TYPE_CHECKING."""
    tree = ast.parse(source)
    hidden = set()
    if not typing_only:
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
                hidden |= {id(inner) for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if id(node) in hidden:
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import; write the whole name"
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"


def source_files(package: Path = PACKAGE) -> list[Path]:
    """The package's Python files. Those among the recipes are data, loaded by path."""
    return [path for path in sorted(package.rglob("*.py")) if "recipes" not in path.relative_to(package).parts]


@cache
def read_structure(package: Path = PACKAGE) -> Structure:
    """The structure of the package at this path. What an `__init__` names for type checkers only is no import of it."""
    paths = {module_name(path, package): path for path in source_files(package)}
    packages = frozenset(module for module, path in paths.items() if path.name == "__init__.py")
    imported = {}
    for module, path in paths.items():
        named = imports(path.read_text(encoding="utf-8"), typing_only=module not in packages)
        imported[module] = frozenset(m for _, name in named if (m := _module(name, paths)) and m != module)
    lines = {module: len(path.read_text(encoding="utf-8").splitlines()) for module, path in paths.items()}
    return Structure(lines=lines, packages=packages, imports=imported)


def module_name(path: Path, package: Path = PACKAGE) -> str:
    """The dotted name of a file of the package."""
    return ".".join((package.name, *path.relative_to(package).with_suffix("").parts)).removesuffix(".__init__")


def _module(name: str, known: Mapping[str, Path]) -> str | None:
    """The module that an imported name is or lies in; a package's own version and names count as no module."""
    if name in known:
        return name
    parent = name.rpartition(".")[0]
    return parent if parent in known and parent != "flatpeak" else None


def occurrences(package: Path, pattern: str) -> int:
    """Count the occurrences of a text in the package's files."""
    return sum(path.read_text(encoding="utf-8").count(pattern) for path in source_files(package))


def sampler_questions(package: Path = PACKAGE) -> int:
    """Count the calls of `isinstance` that name a class of samplers: one whose bases lead to `Sampler`, or it itself.

    Hooks of the base class answer whatever such a call would ask.
    """
    bases: dict[str, set[str]] = {}
    calls: list[ast.Call] = []
    for path in source_files(package):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                bases[node.name] = _names(node.bases)
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
                calls.append(node)
    samplers = {"Sampler", "SamplerLike"}
    while derived := {name for name, names in bases.items() if names & samplers} - samplers:
        samplers |= derived
    return sum(1 for call in calls if _names(call.args[1:]) & samplers)


def child_boots(package: Path = PACKAGE) -> int:
    """Count the commands that start this Python with code of their own: `utils/child_process.py` has the only one."""
    sources = [path.read_text(encoding="utf-8") for path in source_files(package)]
    trees = [ast.parse(source) for source in sources if "sys.executable" in source]
    lists = [ast.unparse(node) for tree in trees for node in ast.walk(tree) if isinstance(node, ast.List)]
    return sum(1 for text in lists if "sys.executable" in text and "'-c'" in text)


def _names(nodes: Sequence[ast.expr]) -> set[str]:
    """All names in these expressions; of a dotted name the last one too."""
    inner = [node for each in nodes for node in ast.walk(each)]
    return {node.id for node in inner if isinstance(node, ast.Name)} | {
        node.attr for node in inner if isinstance(node, ast.Attribute)
    }


def code_lines(source: str) -> int:
    """Lines of code, imports included: without blank lines, comments and docstrings."""
    layout = (tokenize.NL, tokenize.NEWLINE, tokenize.COMMENT, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    held = {
        line
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type not in layout
        for line in range(token.start[0], token.end[0] + 1)
    }
    texts = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]
    return len(held - {line for node in texts for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)})


def folders(package: Path = PACKAGE) -> dict[str, tuple[int, int]]:
    """Files and lines of code of each folder, subfolders apart."""
    totals: dict[str, tuple[int, int]] = {}
    for path in source_files(package):
        name = path.parent.relative_to(package).as_posix()
        files, lines = totals.get(name, (0, 0))
        totals[name] = files + 1, lines + code_lines(path.read_text(encoding="utf-8"))
    return totals


def count(package: Path = PACKAGE) -> dict[str, int]:
    """The figures of docs/architecture.md, in its order."""
    structure = read_structure(package)
    ranked = all(part_of(module) in RANK for module in structure.lines if "." in module)
    names = Counter(path.name for path in source_files(package))
    by_folder = folders(package).values()
    return {
        "Python files": len(structure.lines),
        "lines": sum(structure.lines.values()),
        "lines of code": sum(lines for _, lines in by_folder),
        "lines of code of the largest folder": max(lines for _, lines in by_folder),
        "files of the fullest folder": max(files for files, _ in by_folder),
        "files with a single importer": len(structure.single_importers),
        f"files under {SMALL} lines": len(structure.small),
        "loose files at the top": sum(1 for path in package.glob("*.py")),
        "file names used more than once": sum(1 for n in names.values() if n > 1),
        "module names with two meanings": len(structure.ambiguous),
        "circles of imports": len(structure.circles),
        "imports that run up": len(structure.upward) if ranked else -1,
        "boots of child processes": child_boots(package),
        "own imports of build, train and lifecycle, at most": max(structure.assembly_imports.values(), default=0),
        "`getattr(flatpeak, ...)`": occurrences(package, "getattr(flatpeak"),
        "`isinstance(_, RewardSet)`": occurrences(package, ", RewardSet)"),
        "`isinstance(_, Sampler)`, or any class of samplers": sampler_questions(package),
    }


def main() -> None:
    """Print the figures as rows of a table, or check those of the documentation."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--package", type=Path, default=PACKAGE, help="another checkout's src/flatpeak")
    parser.add_argument("--check", action="store_true", help="fail where docs/architecture.md says otherwise")
    parser.add_argument("--list", action="store_true", help="name the files behind the figures")
    given = parser.parse_args()
    counts = count(given.package)
    if given.check:
        page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
        stale = [name for name, n in counts.items() if not name.startswith("lines") and not _is_in_table(page, name, n)]
        if stale:
            sys.exit(f"docs/architecture.md is out of date: {', '.join(f'{name} {counts[name]}' for name in stale)}")
        return
    for name, n in counts.items():
        print(f"| {name} | {n:,} |")
    if given.list:
        structure = read_structure(given.package)
        for name, (files, lines) in sorted(folders(given.package).items(), key=lambda item: -item[1][1]):
            print(f"{lines:6,} lines of code in {files} files: {name}")
        for title in ("single_importers", "small", "ambiguous", "circles", "upward"):
            print(title, *_listed(getattr(structure, title)), sep="\n  ")


def _is_in_table(page: str, name: str, n: int) -> bool:
    rows = [line.split("|") for line in page.splitlines() if line.startswith(f"| {name} |")]
    return any(row[-2].strip() == f"{n:,}" for row in rows)


def _listed(modules: object) -> list[str]:
    items = modules.items() if isinstance(modules, dict) else modules
    return [str(item) for item in items]  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
