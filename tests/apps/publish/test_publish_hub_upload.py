"""Uploads to a scripted Hub: whole, repeated after an interruption, refused in one line."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from flatpeak.apps.publish.hub_upload import UploadError
from flatpeak.apps.publish.push import push
from flatpeak.cli.main import app
from flatpeak.errors import UserError
from support.hub_server import TOKEN, Hub, scripted_hub
from support.pushed_runs import contents, copied


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A Hub without repositories."""
    with scripted_hub(monkeypatch) as server:
        yield server


def test_the_hub_has_exactly_the_folder_of_a_dry_run_and_others_load_it(
    hub: Hub, finished_run: Path, tmp_path: Path
) -> None:
    push(finished_run, repo="me/tiny", dry_run=tmp_path / "dry")
    assert hub.requests == []
    result = push(finished_run, repo="me/tiny")
    assert result.address == f"{hub.url}/me/tiny"
    downloaded = hub.download("me/tiny", tmp_path / "down")
    assert contents(downloaded) == contents(tmp_path / "dry")
    assert AutoModelForCausalLM.from_pretrained(downloaded).config.hidden_size == 16
    assert len(hub.repositories["me/tiny"].commits) == 1
    assert hub.repositories["me/tiny"].private is False
    assert not any(TOKEN.encode() in body for body in hub.bodies)
    assert list(finished_run.parent.iterdir()) == [finished_run]


def test_an_interrupted_upload_is_continued_by_the_same_command(hub: Hub, finished_run: Path, tmp_path: Path) -> None:
    hub.failures["POST /api/models/me/tiny/commit"] = [500] * 20
    with pytest.raises(
        UploadError, match=r"me/tiny: the Hub fails \(500\); repeat the command later; what is uploaded"
    ):
        push(finished_run, repo="me/tiny")
    assert len(hub.sent) == 1
    assert hub.repositories["me/tiny"].files == {}
    hub.failures.clear()
    push(finished_run, repo="me/tiny")
    assert len(hub.sent) == 1
    push(finished_run, repo="me/again", dry_run=tmp_path / "dry")
    assert set(hub.repositories["me/tiny"].files) == {path.name for path in (tmp_path / "dry").iterdir()}


def test_a_checkpoint_that_is_deleted_meanwhile_is_one_line_and_leaves_nothing_behind(
    hub: Hub, finished_run: Path, tmp_path: Path
) -> None:
    run = copied(finished_run, tmp_path / "runs" / "one")
    with pytest.raises(UploadError, match=r"is gone: repeat the command, since a run that is going on may"):
        push(run, repo="me/tiny", announce=lambda files: shutil.rmtree(run / "checkpoints"))
    assert hub.requests == []
    assert list(run.parent.iterdir()) == [run]


def test_a_failure_of_a_moment_is_tried_again_by_itself(hub: Hub, finished_run: Path) -> None:
    hub.failures["PUT /lfs/"] = [503]
    push(finished_run, repo="me/tiny")
    assert len(hub.sent) == 1


def test_weights_of_an_earlier_push_do_not_stay_beside_the_new_ones(hub: Hub, finished_run: Path) -> None:
    push(finished_run, repo="me/tiny")
    files = hub.repositories["me/tiny"].files
    files |= {"adapter_model.safetensors": b"x", "adapter_config.json": b"{}", "notes.md": b"mine", "eval/a.json": b"1"}
    push(finished_run, repo="me/tiny", checkpoint="last")
    assert {"notes.md", "eval/a.json", "model.safetensors"} <= set(files)
    assert not [name for name in files if name.startswith("adapter")]
    deleted = [one for one in hub.repositories["me/tiny"].commits[-1] if one.startswith("delete")]
    assert sorted(deleted) == ["delete adapter_config.json", "delete adapter_model.safetensors"]


def test_a_private_push_makes_a_private_repository_and_leaves_a_public_one_alone(hub: Hub, finished_run: Path) -> None:
    push(finished_run, repo="me/hidden", private=True)
    assert hub.repositories["me/hidden"].private
    push(finished_run, repo="me/tiny")
    before = dict(hub.repositories["me/tiny"].files)
    with pytest.raises(
        UserError, match="me/tiny exists and is public: make it private in its settings first, or choose"
    ):
        push(finished_run, repo="me/tiny", checkpoint="sft", private=True)
    assert hub.repositories["me/tiny"].files == before


@pytest.mark.parametrize(
    ("line", "status", "advice", "kind"),
    [
        (
            "/api/repos/create",
            401,
            r"the Hub refuses the token: make one with write access at http.*/settings/tokens",
            2,
        ),
        ("/api/repos/create", 403, r"may not write to me: use one with write access to it, or another --repo", 2),
        ("/api/repos/create", 404, r"no user or organization me", 2),
        ("/commit/", 409, r"changed at the same time: repeat the command", 1),
        ("/commit/", 418, r"the Hub refuses \(418\)", 2),
        ("/preupload/", 502, r"the Hub fails \(502\); repeat the command later", 1),
        ("/lfs/", 500, r"the Hub fails \(500\); repeat the command later", 1),
    ],
)
def test_a_refusal_of_the_hub_is_one_line_that_names_the_fix(
    hub: Hub, finished_run: Path, line: str, status: int, advice: str, kind: int
) -> None:
    hub.failures[line] = [status] * 20
    with pytest.raises(UserError, match=advice) as caught:
        push(finished_run, repo="me/tiny")
    assert isinstance(caught.value, UploadError) == (kind == 1)
    assert "\n" not in str(caught.value)
    assert TOKEN not in str(caught.value)


def test_a_card_that_the_hub_does_not_take_is_refused_before_anything_is_sent(hub: Hub, finished_run: Path) -> None:
    with pytest.raises(UserError, match=r"me/tiny: the Hub refuses the files: .*license of-my-own"):
        push(finished_run, repo="me/tiny", license="of-my-own")
    assert hub.sent == []


def test_without_a_token_a_network_or_leave_to_ask_the_fix_is_named(
    hub: Hub, finished_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(
        UploadError, match=r"http://127\.0\.0\.1:9: the upload was interrupted \(.*\); repeat the command"
    ):
        push(finished_run, repo="me/tiny")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        UserError, match=r"HF_HUB_OFFLINE is set: unset it to push, or write the folder alone with --dry"
    ):
        push(finished_run, repo="me/tiny")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(
        UserError, match=r"there is no token for http.*: set HF_TOKEN to one with write access, or run hf"
    ):
        push(finished_run, repo="me/tiny")
    assert hub.requests == []


def test_the_command_lists_the_files_before_it_uploads_and_prints_the_address(hub: Hub, finished_run: Path) -> None:
    result = CliRunner().invoke(app, ["push", str(finished_run), "--repo", "me/tiny", "--with", "rollouts,report"])
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].startswith("push: 12 files, ")
    assert lines[0].endswith(" kB, to me/tiny")
    assert [line.split()[-1] for line in lines[1:-1]] == sorted(hub.repositories["me/tiny"].files)
    assert lines[-1].endswith(f"-> {hub.url}/me/tiny")
    assert {"report.html", "rollouts/step_000001.jsonl"} <= set(hub.repositories["me/tiny"].files)


def test_the_documents_commands_run_as_they_stand_and_its_options_are_all_there(
    hub: Hub, finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = (Path(__file__).parents[3] / "docs" / "sharing.md").read_text(encoding="utf-8")
    (tmp_path / "runs").mkdir()
    copied(finished_run, tmp_path / "runs" / "demo")
    monkeypatch.chdir(tmp_path)
    commands = [
        shlex.split(line, comments=True) for line in re.findall(r"^flatpeak (push .*)$", document, re.MULTILINE)
    ]
    assert len(commands) == 2
    for command in commands:
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 0, result.output
    assert hub.repositories["your-name/demo"].private
    files = {path.name: path.read_bytes() for path in (tmp_path / "demo-folder").iterdir()}
    assert hub.repositories["your-name/demo"].files == files
    options = set(re.findall(r"^\| `(--[a-z-]+)` \|", document, re.MULTILINE))
    listed = set(re.findall(r"--[a-z][a-z-]+", CliRunner().invoke(app, ["push", "--help"]).output))
    assert options | {"--repo", "--dry-run", "--json", "--help"} == listed
