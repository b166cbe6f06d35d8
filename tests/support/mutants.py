"""Faults put into the source one at a time, each run against the tests of its own folder: are they caught?

    python tests/support/mutants.py draw             # writes tests/mutants.json from the present source
    python tests/support/mutants.py run --json FILE  # runs them against the present source and tests (20 minutes)

A fault is one operator, comparison, constant or condition of a function, named by function and text, so that the same
ones are found after code has moved. One whose function or text is gone counts as gone. The tests are those of the
folder of the same name, those of the fault's file first, until one fails or the CPU seconds are spent.
"""

from __future__ import annotations

import ast
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE, LIST = Path("src/flatpeak"), ROOT / "tests/mutants.json"
CORE = (
    "distributed", "evaluation", "functional", "gradreg", "kernels", "policy", "rewards", "rollout", "tasks", "training"
)  # fmt: skip
SEED, COUNT, CPU_SECONDS = 2026, 60, 20
OPERATORS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A fault: the expression `before` at its `index`-th place in a function, replaced by `after`."""

    folder: str
    file: str
    function: str
    """With its class: `Trainer.train_step`."""
    before: str
    after: str
    index: int


def functions(tree: ast.AST, outer: str = "") -> Iterator[tuple[str, ast.AST]]:
    """The functions of a module with their qualified names, inner ones as part of the outer."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{outer}{node.name}", node
        elif isinstance(node, ast.ClassDef):
            yield from functions(node, f"{outer}{node.name}.")


def faulty(node: ast.expr) -> ast.expr | None:
    """The expression with one fault; None where there is none to make."""
    changed = deepcopy(node)
    match changed:
        case ast.BinOp() | ast.BoolOp() if type(changed.op) in OPERATORS:
            changed.op = OPERATORS[type(changed.op)]()  # type: ignore[assignment]
        case ast.Compare(ops=[operator]) if type(operator) in OPERATORS:
            changed.ops = [OPERATORS[type(operator)]()]  # type: ignore[list-item]
        case ast.UnaryOp(op=ast.Not()):
            changed = changed.operand
        case ast.Constant(value=bool()):
            changed.value = not changed.value
        case ast.Constant(value=int() | float()):
            changed.value = changed.value + 1
        case _:
            return None
    return changed


def expressions(function: ast.AST) -> Iterator[ast.expr]:
    """All expressions of a function in the order of its text, without annotations and text."""
    for node in ast.iter_child_nodes(function):
        if isinstance(node, ast.arguments | ast.JoinedStr | ast.pattern) or node is getattr(
            function, "annotation", None
        ):
            continue
        if isinstance(node, ast.expr):
            yield node
        yield from expressions(node)


def draw() -> list[Mutant]:
    """Faults of the present core, `COUNT` of them by the committed seed: a function, then one of its expressions."""
    places: list[tuple[Path, str, ast.AST]] = []
    for folder in CORE:
        for path in sorted((ROOT / SOURCE / folder).rglob("*.py")):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            places += [(path, name, function) for name, function in functions(tree)]
    rng = random.Random(SEED)
    drawn: dict[tuple[Path, str], Mutant] = {}
    while len(drawn) < COUNT:
        path, name, function = rng.choice(places)
        every = list(expressions(function))
        able = [node for node in every if faulty(node) is not None]
        if not able or (path, name) in drawn:
            continue
        node = rng.choice(able)
        before = ast.unparse(node)
        index = [one for one in every if ast.unparse(one) == before].index(node)
        changed = faulty(node)
        assert changed is not None
        drawn[path, name] = Mutant(
            folder=path.relative_to(ROOT / SOURCE).parts[0],
            file=path.name,
            function=name,
            before=before,
            after=ast.unparse(changed),
            index=index,
        )
    return list(drawn.values())


def put(mutant: Mutant, source: Path) -> Path | None:
    """Write a fault into a copy of the source; the changed file, or None where its function or text is gone."""
    for path in sorted(source.rglob("*.py"), key=lambda path: (path.name != mutant.file, path)):
        text = path.read_text(encoding="utf-8")
        for name, function in functions(ast.parse(text)):
            same = [one for one in expressions(function) if ast.unparse(one) == mutant.before]
            if name == mutant.function and mutant.index < len(same):
                path.write_text(replaced(text, same[mutant.index], mutant.after), encoding="utf-8")
                return path
    return None


def replaced(text: str, node: ast.expr, after: str) -> str:
    """The text with another expression, in brackets, in place of the node's."""
    lines = text.encode().splitlines(keepends=True)
    assert node.end_lineno is not None
    start = sum(map(len, lines[: node.lineno - 1])) + node.col_offset
    end = sum(map(len, lines[: node.end_lineno - 1])) + (node.end_col_offset or 0)
    return (text.encode()[:start] + f"({after})".encode() + text.encode()[end:]).decode()


def test_files(path: Path, folder: str) -> list[str]:
    """The fast tests of a folder, those named after the faulty file first, and the table of bad input."""
    files = [*sorted((ROOT / "tests" / folder).rglob("test_*.py")), ROOT / "tests/test_bad_input_table.py"]
    return [str(file) for file in sorted(files, key=lambda file: path.stem not in file.stem)]


def outcome(mutant: Mutant) -> str:
    """caught, survived or gone."""
    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory) / "src"
        shutil.copytree(ROOT / "src", source)
        path = put(mutant, source / "flatpeak")
        if path is None:
            return "gone"
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not slow and not exhaustive"]
        command += ["-p", "no:cacheprovider", f"--basetemp={directory}/tests", *test_files(path, mutant.folder)]
        environment = {**os.environ, "PYTHONPATH": f"{source}:{ROOT / 'tests'}:{ROOT}", "OMP_NUM_THREADS": "1"}
        # The limit's signal ends pytest, which is how a fault survives; a failed test ends it with 1 before.
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            capture_output=True,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS)),
        )
    return "survived" if done.returncode in (0, -9, -24) else "caught"


def main() -> None:
    """Draw the faults, or run them."""
    if sys.argv[1:] == ["draw"]:
        LIST.write_text(json.dumps([asdict(mutant) for mutant in draw()], indent=1) + "\n", encoding="utf-8")
        return
    mutants = [Mutant(**row) for row in json.loads(LIST.read_text(encoding="utf-8"))]
    results = []
    for mutant in mutants:
        results.append({**asdict(mutant), "outcome": outcome(mutant)})
        print(f"{results[-1]['outcome']:9}{mutant.folder}: {mutant.function}: {mutant.before} -> {mutant.after}")
    if "--json" in sys.argv:
        Path(sys.argv[sys.argv.index("--json") + 1]).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    counts = {kind: sum(row["outcome"] == kind for row in results) for kind in ("caught", "survived", "gone")}
    print(", ".join(f"{count} {kind}" for kind, count in counts.items()), f"of {len(results)}")


if __name__ == "__main__":
    main()
