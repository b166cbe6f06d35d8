"""The user's code: loading what a recipe names, and describing its values and errors on one line."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from flatpeak.errors import UserError, did_you_mean

_INSTALLED: Final = (
    *(sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib")),
    f"{Path(__file__).parents[1]}{os.sep}",
)
"""The directories of installed packages, of the standard library, and of flatpeak, which may be installed elsewhere."""
USER_FILE: Final = "flatpeak_user_"
"""Prefix of the module names of user files: such a module cannot be imported by name, only run from its file."""
_DIGEST: Final = "__flatpeak_digest__"
"""The attribute of a loaded file with the digest of its text."""
REFERENCES: Final = ("loss", "function", "factory")
"""The last components of the settings that may name a user's function."""
FROM_PYTHON: Final = "python:"
"""Prefix, in a run's recipe, of the reference to a function that a Python caller passed."""


class OneLineError(Exception):
    """An exception whose text alone explains it completely, on one line."""


def load_function(reference: str) -> Callable[..., Any]:
    """The function that `module:name` or `file.py:name` names; a UserError says what is missing."""
    function = load_object(reference, where=f"function {reference!r}")
    if not callable(function):
        name = reference.rpartition(":")[2]
        raise UserError(f"function {reference!r}: {name!r} is {describe_value(function)}, not a function")
    return function  # type: ignore[no-any-return]


def load_object(reference: str, *, where: str) -> Any:
    """The object that `module:name` or `file.py:name` names; a UserError, which begins with `where`, if it is missing.

    Modules are also searched in the working directory, and a file may import its neighbours: both directories are
    appended to `sys.path`. A file is run once, for any number of objects taken from it.
    """
    source, _, name = reference.rpartition(":")
    if not source or not name:
        raise UserError(f"{where}: write module:name or file.py:name")
    if reference.startswith(FROM_PYTHON):
        raise UserError(
            f"{where} was given in Python, of which a run keeps no copy: give it again as it was given then, or name "
            "it by module:name or file.py:name"
        )
    try:
        module = load_file(Path(source)) if source.endswith(".py") else _load_module(source)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    if not hasattr(module, name):
        public = [known for known in vars(module) if not known.startswith("_")]
        raise UserError(f"{where}: {source} has no {name!r}{did_you_mean(name, public)}")
    return getattr(module, name)


def load_file(path: Path) -> ModuleType:
    """The file as a module; UserError if it is missing or fails. It is run again if its text has changed."""
    path = path.expanduser().resolve()
    if not path.is_file():
        raise UserError(f"there is no file {path}: give a path that exists, relative to {Path.cwd()} or absolute")
    name = f"{USER_FILE}{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    try:
        text = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot run {path}: {one_line(error)}") from error
    digest = _digest(text)
    if name in sys.modules and getattr(sys.modules[name], _DIGEST) == digest:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    _make_importable(path.parent)
    setattr(module, _DIGEST, digest)
    sys.modules[name] = module  # before it runs, because dataclasses and pickle look up their module by name
    try:
        # Not by the loader, whose bytecode on disk would survive a change of equal length within a second.
        exec(compile(text, path, "exec", dont_inherit=True), vars(module))
    except (Exception, SystemExit) as error:  # a script that calls sys.exit() must not end the run silently
        del sys.modules[name]
        raise UserError(f"cannot run {path}: {one_line(error)}") from error
    return module


def check_call(
    function: Callable[..., Any], *, given: Sequence[str], arguments: Mapping[str, Any], where: str, key: str
) -> None:
    """UserError, beginning with `where`, if the function cannot be called with these positional arguments.

    `arguments` are passed by name, and are set under the dotted key `key`.
    """
    try:
        inspect.signature(function).bind(*given, **arguments)
    except TypeError as error:
        call = f"let it take ({', '.join(given)})" if given else ""
        fixable = bool(arguments) or not given or "missing" in str(error)
        fix = f"change {key} to fit its parameters" if fixable else ""
        raise UserError(f"{where}: {error}; {', and '.join(filter(None, (call, fix)))}") from error
    except ValueError:  # functions of an extension do not show their parameters
        pass


def asked_by_name(function: Callable[..., Any], names: Collection[str]) -> frozenset[str]:
    """Those of `names` that a function has parameters for; none for a function that does not show its parameters."""
    try:
        return frozenset(inspect.signature(function).parameters) & frozenset(names)
    except ValueError:
        return frozenset()


def source_digest(function: object) -> str | None:
    """The start of the SHA-256 of a function's text, or of a callable object's class; None if there is no text.

    None for a lambda: its lines hold other code too.
    """
    while isinstance(function, partial):
        function = function.func
    if not inspect.isroutine(function) and not inspect.isclass(function):
        function = type(function)
    if getattr(function, "__name__", "") == "<lambda>":
        return None
    try:
        text = inspect.getsource(function)
    except (OSError, TypeError):
        return None
    return _digest(text.encode("utf-8", "surrogatepass"))


def file_digest(reference: str) -> str | None:
    """The start of the SHA-256 of the file that contains `module:name` or `file.py:name`; None if there is none.

    A module need not be loaded. Files that it imports do not count.
    """
    source = reference.rpartition(":")[0]
    file = source if source.endswith(".py") else _module_file(source)
    try:
        return _digest(Path(str(file)).expanduser().read_bytes()) if file else None
    except OSError:
        return None


def _module_file(name: str) -> str | None:
    """The file of a module, found without importing it or the packages around it; None without a file."""
    if name in sys.modules:
        return getattr(sys.modules[name], "__file__", None)
    packages = name.split(".")
    locations: Sequence[str] | None = [*sys.path, str(Path.cwd())]
    spec = None
    for end, package in enumerate(packages, start=1):
        if locations is None or not package.isidentifier():
            return None
        spec = PathFinder.find_spec(".".join(packages[:end]), locations)
        locations = spec.submodule_search_locations if spec is not None else None
    return spec.origin if spec is not None and spec.has_location else None


def _digest(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()[:16]


def user_files() -> dict[str, str]:
    """The paths of the user files that this process has run, by the names of their modules."""
    loaded = [*sys.modules.items()]
    return {name: str(module.__file__) for name, module in loaded if name.startswith(USER_FILE)}


def _load_module(name: str) -> ModuleType:
    _make_importable(Path.cwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise UserError(
            f"cannot import module {name!r}: {type(error).__name__}: {error}; install it, or write file.py:name for a "
            "file here"
        ) from error
    except Exception as error:
        raise UserError(f"cannot import module {name!r}: {one_line(error)}") from error


def _make_importable(directory: Path) -> None:
    # At the end, because a user's types.py must not replace the standard library's.
    if str(directory) not in sys.path:
        sys.path.append(str(directory))


def describe_value(value: object) -> str:
    """A value and its type, short enough for one line."""
    if value is None:
        return "None"
    try:
        text = " ".join(repr(value).split())[:60]
    except Exception:  # an integer with too many digits, or a user's object
        text = "(it cannot be shown)"
    return f"{type(value).__name__} {text}"


def as_metric(name: str, value: Any) -> float:
    """A value that a user's code logs, as a float. ValueError for a name that is not a text, or no number."""
    if not isinstance(name, str) or not name:
        raise ValueError(f"log_metric: the name of a metric is {describe_value(name)}: give a text, such as 'words'")
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise ValueError(f"log_metric({name!r}, ...): the value is {describe_value(value)}: give a number") from None


def one_line(error: BaseException) -> str:
    """An exception as one line: its type, its message, and the line of code that raised it or called what raised it.

    If an installed package such as torch raised it, the line outside of the package is named.
    """
    if isinstance(error, OneLineError):
        return str(error)
    frames = traceback.walk_tb(error.__traceback__)
    lines = [(frame.f_code.co_filename, number) for frame, number in frames if frame.f_code.co_filename != __file__]
    outside = [line for line in lines if not line[0].startswith(_INSTALLED)] or lines
    source = f" ({outside[-1][0]}:{outside[-1][1]})" if outside else ""
    try:
        message = " ".join(str(error)[:3000].split())[:300]
    except Exception:  # raised by a user's exception class
        message = "(its message cannot be read)"
    return f"{type(error).__name__}: {message}{source}"
