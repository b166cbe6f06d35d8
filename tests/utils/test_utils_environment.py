from __future__ import annotations

import gc
import os
import subprocess
import sys

import pytest

from flatpeak.utils import environment
from flatpeak.utils.environment import DEFAULTS, set_defaults, without_collection


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*DEFAULTS, "MKL_CBWR"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(("vendor", "mkl"), [("GenuineIntel", "AUTO,STRICT"), ("AuthenticAMD", None), ("", None)])
def test_mkl_is_strict_on_intels_processors_alone(
    vendor: str, mkl: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "vendor", lambda: vendor)
    set_defaults()
    assert {name: os.environ[name] for name in DEFAULTS} == DEFAULTS
    assert os.environ.get("MKL_CBWR") == mkl


def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "vendor", lambda: "GenuineIntel")
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    set_defaults()
    assert (os.environ["MKL_CBWR"], os.environ["OMP_WAIT_POLICY"]) == ("COMPATIBLE", "ACTIVE")


def test_importing_flatpeak_sets_the_variables_and_loads_no_torch() -> None:
    code = "import os, sys, flatpeak; print(os.environ['OMP_WAIT_POLICY'], 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "PASSIVE False\n"


@pytest.mark.parametrize("collects", [True, False])
def test_imports_are_made_without_garbage_collection_which_is_then_as_it_was(collects: bool) -> None:
    before = gc.isenabled()
    try:
        (gc.enable if collects else gc.disable)()
        with pytest.raises(ImportError), without_collection():
            assert not gc.isenabled()
            raise ImportError
        assert gc.isenabled() is collects
    finally:
        (gc.enable if before else gc.disable)()


def test_imported_objects_are_old_and_not_frozen() -> None:
    with without_collection():
        imported: list[list[int]] = [[]]
    oldest = {id(each) for each in gc.get_objects(generation=2)}
    assert id(imported) in oldest
    assert gc.get_freeze_count() == 0


def test_what_the_user_froze_stays_frozen() -> None:
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        with without_collection():
            pass
        assert gc.get_freeze_count() >= frozen - 100  # frozen objects may end
    finally:
        gc.unfreeze()
