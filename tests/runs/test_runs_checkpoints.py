import json
import pickle
import shutil
import warnings
from pathlib import Path

import pytest
import torch

from flatpeak.errors import UserError
from flatpeak.runs.checkpoints import (
    MANIFEST,
    CheckpointError,
    broken_file,
    checkpoint_steps,
    link_checkpoint,
    newest_valid,
    prune,
    read_checkpoint,
    remove_leftovers,
    write_checkpoint,
    write_manifest,
)

FILES = (
    "config.json",
    "model.safetensors",
    "extra/tokenizer.json",
    "trainer/state.safetensors",
    "trainer/state.json",
    MANIFEST,
)


def names(parent: Path) -> list[str]:
    return sorted(path.name for path in parent.iterdir())


def no_model(directory: Path) -> None:
    pass


def test_tensors_come_back_bit_for_bit(tmp_path):
    tensors = {
        "float32": torch.tensor([[0.1, -0.0], [float("nan"), 1e-45]]),
        "bfloat16": torch.tensor([1 / 3, -2.5, float("-inf")], dtype=torch.bfloat16),
        "int64": torch.tensor([2**62 + 1, -1]),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "bytes": torch.arange(5, dtype=torch.uint8),
        "empty": torch.zeros(0, 3),
        "transposed": torch.arange(6.0).reshape(2, 3).T,
    }
    path = write_checkpoint(tmp_path, 7, save_model=no_model, tensors=tensors, state={})
    loaded = read_checkpoint(path).tensors
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert loaded[name].shape == tensor.shape
        assert torch.equal(
            loaded[name].reshape(-1).view(torch.uint8), tensor.contiguous().reshape(-1).view(torch.uint8)
        )


def test_tensors_that_share_memory_are_saved_each_by_itself(tmp_path):
    table = torch.arange(4.0)  # as bitsandbytes' states of all weights share one table of codes
    tensors = {"0.table": table, "1.table": table, "1.half": table[:2]}
    path = write_checkpoint(tmp_path, 7, save_model=no_model, tensors=tensors, state={})
    loaded = read_checkpoint(path).tensors
    assert {name: tensor.tolist() for name, tensor in loaded.items()} == {
        "0.table": [0, 1, 2, 3],
        "1.table": [0, 1, 2, 3],
        "1.half": [0, 1],
    }


def test_state_step_and_model_come_back(tmp_path, write):
    path = write(tmp_path / "checkpoints", 50)
    assert path == tmp_path / "checkpoints" / "step_000050"
    loaded = read_checkpoint(path)
    assert loaded.state == {"cursor": 150, "note": "später", "best": float("-inf")}
    assert loaded.step == 50
    assert loaded.path == path
    assert (path / "extra" / "tokenizer.json").read_text() == '{"vocab": ["a", "b"]}\n'
    assert names(tmp_path / "checkpoints") == ["step_000050"]


def test_every_file_is_in_the_manifest_with_its_size(tmp_path, write):
    path = write(tmp_path, 1)
    manifest = json.loads((path / MANIFEST).read_text())
    assert set(manifest["files"]) == set(FILES) - {MANIFEST}
    assert manifest["files"]["model.safetensors"]["bytes"] == 1024
    # SHA-256 of the 23 bytes of config.json, from sha256sum.
    assert manifest["files"]["config.json"] == {
        "bytes": 23,
        "sha256": "f68a01c5183a987078f1551e41df128be7273510adba30d0a83cc905e36d13a8",
    }


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("place", ["first", "middle", "last"])
def test_a_flipped_bit_is_found_and_the_older_checkpoint_used(tmp_path, write, name, place):
    older, newer = write(tmp_path, 1), write(tmp_path, 2)
    content = bytearray((newer / name).read_bytes())
    content[{"first": 0, "middle": len(content) // 2, "last": -1}[place]] ^= 0x01
    (newer / name).write_bytes(content)
    with pytest.raises(UserError, match=f"step_000002/{name}: damaged"):
        read_checkpoint(newer)
    messages: list[str] = []
    assert newest_valid(tmp_path, notice=messages.append) == older
    assert len(messages) == 1
    assert f"step_000002/{name}: damaged" in messages[0]


@pytest.mark.parametrize("name", FILES)
def test_a_truncated_file_is_found(tmp_path, write, name):
    path = write(tmp_path, 2)
    content = (path / name).read_bytes()
    (path / name).write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match=rf"step_000002/{name}: (damaged|has {len(content) // 2} bytes)"):
        read_checkpoint(path)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_found(tmp_path, write, name):
    path = write(tmp_path, 2)
    (path / name).unlink()
    with pytest.raises(UserError, match=f"step_000002/{name}: missing"):
        read_checkpoint(path)


def test_a_broken_newest_checkpoint_is_told_by_a_warning_by_default(tmp_path, write):
    older = write(tmp_path, 1)
    (write(tmp_path, 2) / "trainer/state.json").unlink()
    with pytest.warns(UserWarning, match=r"step_000002/trainer/state\.json: missing; an older checkpoint is used"):
        assert newest_valid(tmp_path) == older


def test_a_run_without_a_whole_checkpoint_is_refused_rather_than_begun_anew(tmp_path, write):
    for step in (1, 2):
        (write(tmp_path, step) / "trainer/state.json").unlink()
    messages: list[str] = []
    with pytest.raises(UserError, match=r"step_000002/trainer/state.json: missing; .*step_000001/.*--overwrite"):
        newest_valid(tmp_path, notice=messages.append)
    assert not messages


def test_newest_is_by_step_not_by_name_or_time(tmp_path, write):
    for step in (1_000_000, 999_999, 5):
        write(tmp_path, step)
    (tmp_path / "step_2000000.bak").mkdir()
    (tmp_path / "step_9").mkdir()
    with warnings.catch_warnings(action="error"):
        assert newest_valid(tmp_path) == tmp_path / "step_1000000"
    assert checkpoint_steps(tmp_path) == [5, 999_999, 1_000_000]


def test_a_run_without_checkpoints_has_no_newest(tmp_path):
    assert newest_valid(tmp_path / "absent") is None


def test_a_pickle_is_refused_and_never_run(tmp_path, write):
    canary = tmp_path / "canary"

    class Malicious:
        def __reduce__(self):
            return (Path.touch, (canary,))

    path = write(tmp_path, 1)
    (path / "trainer/state.safetensors").write_bytes(pickle.dumps(Malicious()))
    (path / MANIFEST).unlink()
    write_manifest(path, step=1)
    with pytest.raises(UserError, match="not a trainer's checkpoint"):
        read_checkpoint(path)
    assert not canary.exists()


def test_best_and_last_are_relative_links_that_move(tmp_path, write):
    first, second = write(tmp_path / "a", 1), write(tmp_path / "a", 2)
    link_checkpoint(tmp_path / "a", "last", first)
    link_checkpoint(tmp_path / "a", "last", second)
    assert (tmp_path / "a" / "last").readlink() == Path("step_000002")
    (tmp_path / "a").rename(tmp_path / "moved")
    assert read_checkpoint(tmp_path / "moved" / "last").step == 2


def test_a_link_takes_the_place_of_the_directory_that_a_copy_of_the_run_has_there(tmp_path, write):
    first, second = write(tmp_path / "a", 1), write(tmp_path / "a", 2)
    link_checkpoint(tmp_path / "a", "last", first)
    shutil.copytree(tmp_path / "a", tmp_path / "copy")  # follows links, as cp -rL and object storage do
    assert not (tmp_path / "copy" / "last").is_symlink()
    link_checkpoint(tmp_path / "copy", "last", second)
    assert (tmp_path / "copy" / "last").readlink() == Path("step_000002")
    assert read_checkpoint(tmp_path / "copy" / "step_000001").step == 1


def test_pruning_keeps_the_first_the_best_the_last_and_the_newest(tmp_path, write):
    paths = {step: write(tmp_path, step) for step in (0, 10, 20, 30, 40, 50)}
    link_checkpoint(tmp_path, "best", paths[20])
    link_checkpoint(tmp_path, "last", paths[50])
    assert prune(tmp_path, keep=1) == [paths[10], paths[30]]
    assert checkpoint_steps(tmp_path) == [0, 20, 40, 50]
    assert prune(tmp_path, keep=1) == []
    assert names(tmp_path) == ["best", "last", "step_000000", "step_000020", "step_000040", "step_000050"]


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path, write):
    write(tmp_path, 3)
    write_checkpoint(tmp_path, 3, save_model=no_model, tensors={"x": torch.tensor(9)}, state={"second": True})
    loaded = read_checkpoint(tmp_path / "step_000003")
    assert loaded.state == {"second": True}
    assert loaded.tensors["x"].item() == 9
    assert names(tmp_path) == ["step_000003"]


def test_stale_temporary_directories_are_ignored_and_cleared_by_the_next_write(tmp_path, write):
    good = write(tmp_path, 1)
    (tmp_path / ".tmp-step_000002").mkdir()
    (tmp_path / ".tmp-step_000002" / "model.safetensors").write_text("half")
    assert newest_valid(tmp_path) == good
    write(tmp_path, 3)
    assert names(tmp_path) == ["step_000001", "step_000003"]


def test_a_replacement_that_was_cut_short_gives_the_old_one_back(tmp_path, write):
    write(tmp_path, 4).rename(tmp_path / ".replaced-step_000004")
    remove_leftovers(tmp_path)
    assert read_checkpoint(tmp_path / "step_000004").step == 4


def test_a_failed_write_says_so_and_leaves_only_the_older_checkpoint(tmp_path, write):
    good = write(tmp_path, 1)

    def full(directory: Path) -> None:
        (directory / "model.safetensors").write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match=r"step_000002: not written .*No space left on device"):
        write_checkpoint(tmp_path, 2, save_model=full, tensors={}, state={})
    assert names(tmp_path) == ["step_000001"]
    assert newest_valid(tmp_path) == good


def test_an_interrupted_write_leaves_no_temporary_directory(tmp_path):
    def interrupt(directory: Path) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_checkpoint(tmp_path, 2, save_model=interrupt, tensors={}, state={})
    assert names(tmp_path) == []


def test_further_texts_lie_beside_the_model_and_are_in_the_manifest(tmp_path):
    path = write_checkpoint(tmp_path, 1, save_model=no_model, tensors={}, state={}, texts={"note.json": "später\n"})
    assert (path / "note.json").read_text(encoding="utf-8") == "später\n"
    assert broken_file(path) is None
    (path / "note.json").write_text("spater\n")
    broken = broken_file(path)
    assert broken is not None
    assert broken.name == "note.json"
