"""The architecture, as tests: imports point one way, files and functions stay short, declarations load no torch."""

import ast
import importlib
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import flatpeak
from support.structure import (
    RANK,
    app_of,
    child_boots,
    imports,
    module_name,
    part_of,
    read_structure,
    sampler_questions,
    source_files,
)

PACKAGE = Path(flatpeak.__file__).parent
FILES = [path.relative_to(PACKAGE) for path in source_files(PACKAGE)]
FUNCTIONAL_MAY_IMPORT = {"torch", "numpy"} | set(sys.stdlib_module_names)
KERNELS_MAY_IMPORT = {"torch", "triton"} | set(sys.stdlib_module_names)
LOOSE = {"__init__.py", "__main__.py", "errors.py", "protocols.py", "types.py"}
"""All that lies beside the packages."""
PIPED = {
    Path(name)
    for name in (
        "rewards/workers/pool.py",
        "rewards/workers/worker.py",
        "episodes/environments.py",
        "episodes/instances.py",
    )
}
"""What a run and its own processes tell each other goes through a pipe, pickled.

The exception is an environment's state, which runs.call_log keeps in a file for a resumed run's workers.
"""
LONGEST_FILE = 400
LONGEST_FUNCTION = 50
MOST_ASSEMBLY_IMPORTS = 15
"""Modules of flatpeak that `build`, `train` and `lifecycle` import, each."""
SHORTEST_FILE = 60
"""A shorter module that one other imports belongs into that one, unless it is in SHORT_FILES."""
SHORT_FILES = {
    "config.distribution": "refusals that read every section, apart from the rules of unused settings",
    "functional.kl": "the KL estimators stand beside the losses, each with its equation",
    "tasks.long_texts": "the cost of tokenizing, which the wording of prompts does not depend on",
}
UNIONS = {"flatpeak.tasks.config", "flatpeak.rewards.config"}


def own_imports(source: str) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import of a part of flatpeak."""
    for line, module in imports(source):
        names = module.split(".")
        if names[0] == "flatpeak" and len(names) > 1 and not names[1].startswith("__"):
            yield line, module


def offences(module: str, source: str) -> list[str]:
    """Imports that run up, and those of another application, line by line."""
    part, app = part_of(module), app_of(module)
    found = [(line, part_of(other), app_of(other)) for line, other in own_imports(source)]
    upward = [
        f"line {line}: {part} imports {other}"
        for line, other, _ in found
        if other != part and RANK[other] >= RANK[part]
    ]
    beside = [f"line {line}: {app} imports {other}" for line, _, other in found if app and other not in ("", app)]
    return upward + beside


def read(path: Path) -> str:
    return (PACKAGE / path).read_text(encoding="utf-8")


@pytest.mark.parametrize("path", [path for path in FILES if path != Path("__init__.py")], ids=str)
def test_imports_point_one_way(path):
    module = module_name(PACKAGE / path, PACKAGE)
    component = part_of(module)
    assert component in RANK, f"{component} has no place in LAYERS of tests/support/structure.py: give it one"
    # A package's public names are looked up when they are asked for; those of `utils.lazy` serve every package.
    assert offences(module, read(path)) == []


@pytest.mark.parametrize(
    ("module", "source", "expected"),
    [
        ("flatpeak.rollout", "from flatpeak.policy.model import Policy", ["line 1: rollout imports policy"]),
        ("flatpeak.runs", "def f():\n    import flatpeak.training.trainer", ["line 2: runs imports training"]),
        (
            "flatpeak.types",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from flatpeak import protocols",
            ["line 3: types imports protocols"],
        ),
        ("flatpeak.training", "from flatpeak.config import RunConfig", ["line 1: training imports config"]),
        ("flatpeak.training", "from flatpeak.tasks.config import TaskConfig\nimport flatpeak", []),
        ("flatpeak.policy", "from flatpeak.policy.linears import x\nfrom flatpeak import __version__", []),
        ("flatpeak.pipeline", "from flatpeak.apps.chat import x", ["line 1: pipeline imports apps"]),
        ("flatpeak.apps.serve", "import flatpeak.pipeline\nimport flatpeak.apps.chat", ["line 2: serve imports chat"]),
        ("flatpeak.apps.publish.push", "from flatpeak.apps.publish import export", []),
    ],
)
def test_an_import_against_the_direction_is_noticed(module, source, expected):
    assert offences(module, source) == expected


def test_no_modules_import_each_other_in_a_circle():
    assert read_structure(PACKAGE).circles == []


def test_no_module_name_means_two_things():
    assert read_structure(PACKAGE).ambiguous == {}


def test_the_modules_that_put_a_run_together_import_few_others():
    counts = read_structure(PACKAGE).assembly_imports
    assert len(counts) == 3
    assert {module: count for module, count in counts.items() if count > MOST_ASSEMBLY_IMPORTS} == {}


def test_only_the_vocabulary_lies_beside_the_packages():
    assert {path.name for path in PACKAGE.glob("*.py")} <= LOOSE


def test_a_short_module_with_one_importer_has_a_reason():
    structure = read_structure(PACKAGE)
    importers = structure.importers
    short = {
        module.removeprefix("flatpeak.")
        for module in structure.single_importers
        # A built-in task or reward, however short, is imported by the union of configurations alone.
        if structure.lines[module] < SHORTEST_FILE and not importers[module] & UNIONS and part_of(module) != "cli"
    }
    assert short == set(SHORT_FILES)


def outside(package: str) -> set[str]:
    """The dotted names that a package of flatpeak imports from outside of it."""
    names = {name for path in FILES if path.parts[0] == package for _, name in imports(read(path))}
    return {name for name in names if not name.startswith(f"flatpeak.{package}.")}


def test_the_mathematics_import_torch_and_five_functions_of_the_kernels():
    names = outside("functional")
    assert {name for name in names if name.startswith("flatpeak")} == {
        "flatpeak.kernels.gpu_kernels.works",
        "flatpeak.kernels.matmul.add_linear",
        "flatpeak.kernels.matmul.linear",
        "flatpeak.kernels.token_logprobs_triton.differentiate_",
        "flatpeak.kernels.token_logprobs_triton.read_logits",
    }
    assert {name.split(".")[0] for name in names} <= FUNCTIONAL_MAY_IMPORT | {"flatpeak"}


def test_the_kernels_import_torch_alone():
    assert {name.split(".")[0] for name in outside("kernels")} <= KERNELS_MAY_IMPORT


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


@pytest.mark.parametrize("path", [path for path in FILES if path.name == "__init__.py"], ids=str)
def test_packages_name_their_public_things_and_define_nothing(path):
    """A docstring, the names for type checkers, and a lazy `__getattr__`; `functional` imports its functions."""
    if path.parent.name in ("", "functional"):
        return
    statements = ast.parse(read(path)).body
    allowed = (ast.Expr, ast.ImportFrom, ast.If, ast.Assign)
    assert all(isinstance(statement, allowed) for statement in statements)
    package = importlib.import_module(module_name(PACKAGE / path, PACKAGE))
    named = {
        alias.name
        for statement in statements
        if isinstance(statement, ast.If)
        for inner in statement.body
        if isinstance(inner, ast.ImportFrom)
        for alias in inner.names
    }
    for name in sorted(named):
        assert getattr(package, name).__module__.startswith("flatpeak.") or name.isupper() or name.endswith("Config")
    with pytest.raises(AttributeError):
        _ = package.no_such_name


def test_no_code_asks_what_a_sampler_is():
    assert sampler_questions() == 0


def test_child_processes_start_in_one_way():
    assert child_boots() == 1


def test_nothing_unpickles_what_a_file_could_hold():
    for path in FILES:
        source = read(path)
        if path in PIPED:
            assert "open(" not in source.replace("Popen(", "")
            continue
        assert not {module for _, module in imports(source) if module.split(".")[0] in ("pickle", "dill")}, path
        assert "torch.load(" not in source, path
        assert "torch.save(" not in source, path


def test_declarations_and_the_command_line_load_no_torch():
    light = [path for path in FILES if path.name in ("config.py", "__init__.py") and path.parts[0] != "functional"]
    light += [path for path in FILES if path.parts[0] in ("config", "cli")]
    light += [Path("types.py"), Path("protocols.py"), Path("errors.py")]
    names = sorted(module_name(PACKAGE / path, PACKAGE) for path in light)
    known = {"flatpeak", "flatpeak.config.run_config", "flatpeak.cli.main", "flatpeak.tasks.config"}
    assert known <= set(names)
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
