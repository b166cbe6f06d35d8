from __future__ import annotations

import sys
from functools import partial

import pytest

from flatpeak.errors import UserError
from flatpeak.utils.user_code import file_digest, load_function, one_line, source_digest


@pytest.fixture(autouse=True)
def unchanged_imports(monkeypatch, tmp_path):
    """Imports made here leave nothing behind."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    monkeypatch.chdir(tmp_path)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return path


def test_a_function_is_found_in_an_installed_module():
    import math

    assert load_function("math:sqrt") is math.sqrt


def test_a_function_is_found_in_a_module_of_the_working_directory(tmp_path):
    write(tmp_path / "my_graders_a.py", "def short(completion): return 0.25")
    assert load_function("my_graders_a:short")("x") == 0.25


@pytest.mark.parametrize("absolute", [True, False])
def test_a_function_is_found_in_a_file(tmp_path, absolute):
    (tmp_path / "sub").mkdir()
    file = write(tmp_path / "sub" / "graders.py", "def short(completion): return 0.5")
    reference = f"{file}:short" if absolute else "sub/graders.py:short"
    assert load_function(reference)("x") == 0.5


def test_a_file_may_import_its_neighbour_and_define_dataclasses(tmp_path):
    write(tmp_path / "neighbour_of_graders.py", "VALUE = 0.75")
    write(
        tmp_path / "graders.py",
        "from __future__ import annotations\nfrom dataclasses import dataclass\nimport neighbour_of_graders\n"
        "@dataclass\nclass Limit:\n    value: float\n"
        "def short(completion): return Limit(neighbour_of_graders.VALUE).value\n",
    )
    assert load_function("graders.py:short")("x") == 0.75


def test_a_file_is_run_once_for_all_its_functions(tmp_path):
    write(
        tmp_path / "graders.py",
        "state = []\ndef one(completion): return state\ndef two(completion): return state",
    )
    assert load_function("graders.py:one")("x") is load_function("graders.py:two")("x")


def test_files_of_one_name_in_two_directories_are_two_modules(tmp_path):
    for directory, value in (("a", 1), ("b", 2)):
        (tmp_path / directory).mkdir()
        write(tmp_path / directory / "graders.py", f"def f(completion): return {value}")
    assert [load_function(f"{directory}/graders.py:f")("x") for directory in "ab"] == [1, 2]


@pytest.mark.parametrize("reference", ["short", ":short", "graders.py:", ""])
def test_a_reference_without_both_halves_is_refused(reference):
    with pytest.raises(UserError, match=r"write module:name or file\.py:name"):
        load_function(reference)


def test_a_missing_file_is_named():
    with pytest.raises(UserError, match=r"there is no file .*nowhere\.py"):
        load_function("nowhere.py:short")


def test_a_missing_module_is_named():
    with pytest.raises(UserError, match=r"cannot import module 'no_such_graders': ModuleNotFoundError"):
        load_function("no_such_graders:short")


def test_a_missing_function_names_the_nearest(tmp_path):
    write(tmp_path / "graders.py", "shorts = 3\ndef shortness(completion): ...\ndef other(completion): ...")
    with pytest.raises(UserError, match=r"graders\.py has no 'shortnes', did you mean 'shortness'\?"):
        load_function("graders.py:shortnes")


def test_something_that_is_no_function_is_described(tmp_path):
    write(tmp_path / "graders.py", "table = {'a': 1}")
    with pytest.raises(UserError, match=r"'table' is dict \{'a': 1\}, not a function"):
        load_function("graders.py:table")


def test_a_file_that_fails_names_its_error_and_line_and_can_be_mended(tmp_path):
    file = write(tmp_path / "graders.py", "\nraise KeyError('boom')")
    with pytest.raises(UserError, match=r"cannot run .*graders\.py: KeyError: 'boom' \(.*graders\.py:2\)"):
        load_function("graders.py:short")
    write(file, "def short(completion): return 0.125  # mended")
    assert load_function("graders.py:short")("x") == 0.125


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def f(completion):\n    return 1)", r"SyntaxError: unmatched '\)' \(graders\.py, line 2\)$"),
        ("import sys\nsys.exit(3)", r"SystemExit: 3 \(.*graders\.py:2\)$"),
    ],
)
def test_a_file_that_cannot_be_loaded_names_its_own_line(tmp_path, text, message):
    write(tmp_path / "graders.py", text)
    with pytest.raises(UserError, match=rf"cannot run .*graders\.py: {message}"):
        load_function("graders.py:f")


def test_an_error_inside_a_package_names_the_line_of_the_user_that_called_it(tmp_path):
    file = write(tmp_path / "graders.py", "import json\ndef f(completion):\n    return json.loads(completion)")
    with pytest.raises(ValueError, match="Expecting") as error:
        load_function("graders.py:f")("{")
    assert one_line(error.value).endswith(f" ({file}:3)")


def test_a_file_of_the_user_does_not_hide_the_standard_library(tmp_path):
    write(tmp_path / "colorsys.py", "mine = True")
    write(tmp_path / "graders.py", "import colorsys\ndef f(completion): return hasattr(colorsys, 'mine')")
    assert load_function("graders.py:f")("x") is False


def test_a_file_is_run_anew_once_its_text_has_changed(tmp_path):
    file = write(tmp_path / "graders.py", "def short(completion): return 1")
    first = load_function("graders.py:short")
    digest = file_digest("graders.py:short")
    assert load_function("graders.py:short") is first
    write(file, "def short(completion): return 2")  # as long as before, within the second that bytecode is kept by
    assert load_function("graders.py:short")("x") == 2
    assert first("x") == 1
    assert (digest, file_digest("graders.py:short")) == (
        "4fb895ffa25d0fa8",
        file_digest(f"{file}:another"),
    )
    assert file_digest("graders.py:short") != digest


def test_a_function_without_a_file_has_no_digest(tmp_path):
    assert file_digest("builtins:len") is None
    assert file_digest("gone.py:short") is None
    assert source_digest(len) is None
    assert source_digest(partial(write, "x")) == source_digest(write)


class Scaled:
    """A callable object."""

    def __call__(self, completion):
        return 2.0


def test_a_callable_object_has_the_digest_of_its_class():
    assert source_digest(Scaled()) == source_digest(Scaled) == source_digest(partial(Scaled(), completion="x"))
    assert source_digest(Scaled()) not in (None, source_digest(write))


def test_a_file_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    file = write(tmp_path / "graders.py", "")
    monkeypatch.setattr(type(file), "read_bytes", lambda path: (_ for _ in ()).throw(PermissionError(13, "denied")))
    with pytest.raises(UserError, match=r"cannot run .*graders\.py: PermissionError: .*denied"):
        load_function("graders.py:short")


def test_a_module_has_the_digest_of_its_file_without_being_imported(tmp_path, monkeypatch):
    package = tmp_path / "rewards_of_mine"
    (package / "inner").mkdir(parents=True)
    for file in (package / "__init__.py", package / "inner" / "__init__.py"):
        file.write_text("raise ValueError('imported')\n")
    (package / "inner" / "short.py").write_text("def score(text):\n    return 1.0\n")
    monkeypatch.chdir(tmp_path)
    assert file_digest("rewards_of_mine.inner.short:score") == file_digest(f"{package}/inner/short.py:score")
    assert file_digest("rewards_of_mine.inner:score") == file_digest(f"{package}/inner/__init__.py:score")
    for missing in ("rewards_of_mine.inner.long:score", "rewards_of_mine.inner.short.x:score", "no_module:f", "a b:f"):
        assert file_digest(missing) is None
    assert not any(name.startswith("rewards_of_mine") for name in sys.modules)
