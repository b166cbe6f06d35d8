"""The architecture, as tests: imports point one way, files and functions stay short, declarations load no torch."""

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import flatpeak
from support.structure import RANK

PACKAGE = Path(flatpeak.__file__).parent
FILES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))

FUNCTIONAL_MAY_IMPORT = {"torch", "numpy"} | set(sys.stdlib_module_names)
LONGEST_FILE = 400
LONGEST_FUNCTION = 50


def component_of(path: Path) -> str:
    return path.parts[0].removesuffix(".py")


def imports(source: str) -> Iterator[tuple[int, str]]:
    """(line, dotted module) of every import, also those inside functions and under TYPE_CHECKING."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import; write the whole name"
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"


def own_imports(source: str) -> Iterator[tuple[int, str]]:
    """(line, component) of every import of a part of flatpeak."""
    for line, module in imports(source):
        parts = module.split(".")
        if parts[0] == "flatpeak" and len(parts) > 1 and not parts[1].startswith("__"):
            yield line, parts[1]


def offences(component: str, source: str) -> list[str]:
    return [
        f"line {line}: {component} imports {other}"
        for line, other in own_imports(source)
        if other != component and RANK[other] >= RANK[component]
    ]


def read(path: Path) -> str:
    return (PACKAGE / path).read_text(encoding="utf-8")


def modules(paths: list[Path]) -> list[str]:
    dotted = [".".join(("flatpeak", *path.with_suffix("").parts)).removesuffix(".__init__") for path in paths]
    return sorted(dotted)


@pytest.mark.parametrize("path", [path for path in FILES if path != Path("__init__.py")], ids=str)
def test_imports_point_one_way(path):
    component = component_of(path)
    assert component in RANK, f"{component} has no place in LAYERS: give it one, and in docs/architecture.md"
    assert offences(component, read(path)) == []


@pytest.mark.parametrize(
    ("component", "source", "found"),
    [
        ("rollout", "from flatpeak.policy.model import Policy", ["line 1: rollout imports policy"]),
        ("runs", "def f():\n    import flatpeak.training.api", ["line 2: runs imports training"]),
        (
            "types",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from flatpeak import protocols",
            ["line 3: types imports protocols"],
        ),
        ("training", "from flatpeak.config.run_config import RunConfig", ["line 1: training imports config"]),
        ("training", "from flatpeak.tasks.config import TaskConfig\nimport flatpeak", []),
        ("policy", "from flatpeak.policy.lm_head import x\nfrom flatpeak import __version__", []),
    ],
)
def test_an_import_against_the_direction_is_noticed(component, source, found):
    assert offences(component, source) == found


def test_the_mathematics_import_torch_and_nothing_of_ours():
    for path in FILES:
        if component_of(path) == "functional":
            roots = {module.split(".")[0] for _, module in imports(read(path))} - {"flatpeak"}
            assert roots <= FUNCTIONAL_MAY_IMPORT, path


@pytest.mark.parametrize("path", FILES, ids=str)
def test_files_and_functions_stay_short(path):
    source = read(path)
    assert len(source.splitlines()) <= LONGEST_FILE
    lengths = {
        node.name: (node.end_lineno or node.lineno) - node.lineno + 1
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert {name: length for name, length in lengths.items() if length > LONGEST_FUNCTION} == {}


def test_packages_are_described_and_hold_nothing():
    for path in FILES:
        if path.name == "__init__.py" and path.parent.name not in ("", "functional"):
            body = ast.parse(read(path)).body
            assert len(body) == 1, path
            assert isinstance(body[0], ast.Expr), path


def test_nothing_unpickles_what_a_file_could_hold():
    for path in FILES:
        source = read(path)
        # What a run and its own processes tell each other goes through a pipe.
        if path in (
            Path("rewards/workers/pool.py"),
            Path("rewards/workers/worker.py"),
            Path("rewards/workers/worker.py"),
        ):
            assert "open(" not in source.replace("Popen(", "")
            continue
        assert not {module for _, module in imports(source) if module.split(".")[0] in ("pickle", "dill")}, path
        assert "torch.load(" not in source, path
        assert "torch.save(" not in source, path


def test_declarations_and_the_command_line_load_no_torch():
    light = [path for path in FILES if path.name in ("config.py", "__init__.py") and component_of(path) != "functional"]
    light += [path for path in FILES if component_of(path) in ("config", "cli")]
    light += [Path("types.py"), Path("protocols.py"), Path("errors.py")]
    names = modules(light)
    assert {
        "flatpeak",
        "flatpeak.config.run_config",
        "flatpeak.config.load",
        "flatpeak.cli.main",
        "flatpeak.tasks.config",
    } <= set(names)
    code = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    assert 'torch' not in sys.modules, name\n"
    )
    done = subprocess.run([sys.executable, "-c", code, *names], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_make_installs_the_torch_that_the_package_asks_for():
    root = Path(__file__).parents[1]
    wanted = next(
        one
        for one in tomllib.loads((root / "pyproject.toml").read_text())["project"]["dependencies"]
        if one.startswith("torch")
    )
    assert f'pip install "{wanted}"' in (root / "Makefile").read_text()
