"""Weights as files: a directory per version, whole or absent, and a new one exactly where the weights have changed."""

import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from flatpeak.errors import UserError
from flatpeak.policy.model import Policy
from flatpeak.rollout.vllm.weight_versions import KEPT, WeightFiles, WeightVersions, checksums_of
from support.architectures import ARCHITECTURES, architecture_model
from support.models import letter_tokenizer, tiny_model
from support.vllm_server import ScriptedPolicy, read_weights
from support.workers import TESTS


def test_a_change_of_one_bit_makes_a_new_version_and_nothing_else_does(tmp_path):
    policy = ScriptedPolicy()
    files = WeightVersions(policy, WeightFiles(policy, str(tmp_path)))
    first = files.current()
    assert files.current().tag == first.tag
    policy.weight.add_(0.25).sub_(0.25)  # written, and the same
    assert files.current().tag == first.tag
    policy.weight.copy_(torch.nextafter(policy.weight, torch.zeros(1)))
    second = files.current()
    assert (first.number, second.number) == (1, 2)
    assert first.tag != second.tag
    assert read_weights(second.path) == policy.weight.item()


def test_checksums_see_what_is_written_behind_the_back_of_autograd():
    weight = torch.arange(6.0)
    before = checksums_of([weight, weight])
    weight.numpy()[3] = -7.0  # as optimizers in 8 bits write: no counter of torch's moves
    assert checksums_of([weight, weight]) != before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("size", [1, 2, 7, 8191, 40_000])
def test_a_checksum_sees_every_single_change(dtype, size):
    weight = torch.randn(size, generator=torch.Generator().manual_seed(size)).to(dtype)
    before = checksums_of([weight])
    assert checksums_of([weight.clone()]) == before
    for position in {0, size // 2, size - 1}:
        changed = weight.clone()
        changed[position] = -changed[position]
        assert checksums_of([changed]) != before
        if size > 1:
            swapped = weight.clone()
            swapped[[position, position - 1]] = weight[[position - 1, position]]
            assert checksums_of([swapped]) != before


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (torch.zeros(4096), torch.ones(4096)),
        (torch.ones(1000), torch.full((1000,), 2.0)),
        (torch.zeros(2), torch.full((2,), 1e-30)),
        (torch.arange(64.0), torch.arange(64.0).flip(0)),
        (torch.arange(64.0).reshape(8, 8), torch.arange(64.0).reshape(8, 8).T.contiguous()),
        (torch.ones(1000, dtype=torch.bfloat16), torch.full((1000,), -1.0, dtype=torch.bfloat16)),
        (torch.tensor([0.0]), torch.tensor([-0.0])),
    ],
    ids=["zeros", "ones", "two", "reversed", "transposed", "signs", "sign of zero"],
)
def test_equal_changes_in_even_number_do_not_cancel(old, new):
    assert checksums_of([old]) != checksums_of([new])


def test_checksums_are_of_the_values_wherever_they_lie():
    buffer = torch.arange(21.0)
    assert checksums_of([buffer[1:]]) == checksums_of([buffer[1:].clone()])
    matrix = torch.arange(12.0).reshape(3, 4)
    assert checksums_of([matrix.T]) == checksums_of([matrix.T.contiguous()])
    assert len(checksums_of([torch.zeros(0), torch.tensor(1.0)])) == 2


def test_old_versions_are_deleted_and_at_the_end_all(tmp_path):
    policy = ScriptedPolicy()
    files = WeightVersions(policy, WeightFiles(policy, str(tmp_path)))
    versions = []
    for _ in range(4):
        versions.append(files.current())
        policy.step()
    assert [version.path.exists() for version in versions] == [False] * (4 - KEPT) + [True] * KEPT
    files.close()
    assert list(tmp_path.iterdir()) == []


KILLED = """
import os, signal, sys
from flatpeak.rollout.vllm.weight_versions import WeightFiles, WeightVersions
from support.vllm_server import ScriptedPolicy
policy = ScriptedPolicy()
versions = WeightVersions(policy, WeightFiles(policy, sys.argv[1]))
versions.current()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_next_trainer_deletes_the_weights_of_a_killed_one_and_no_others(tmp_path):
    policy = ScriptedPolicy()
    versions = WeightVersions(policy, WeightFiles(policy, str(tmp_path)))
    mine = versions.current().path.parent
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], env=environment, check=False)
    (left,) = set(tmp_path.iterdir()) - {mine}
    assert any(left.iterdir())
    files = WeightFiles(policy, str(tmp_path))
    assert not left.exists()
    assert any(mine.iterdir())
    files.close()
    versions.close()


def test_the_first_version_of_a_new_process_has_another_name_than_any_before(tmp_path):
    policy = ScriptedPolicy()
    first, resumed = (WeightVersions(policy, WeightFiles(policy, str(tmp_path))).current() for _ in range(2))
    assert first.number == resumed.number == 1
    assert first.tag != resumed.tag


def test_a_version_that_cannot_be_written_leaves_nothing_behind(tmp_path):
    policy = ScriptedPolicy()
    files = WeightVersions(policy, WeightFiles(policy, str(tmp_path)))
    first = files.current()

    def fail(directory, *, head=False):
        (directory / "half").write_text("x")
        raise OSError("no space left on device")

    policy.step()
    policy.save_weights = fail
    with pytest.raises(UserError, match=r"no space left.*rollout.engine.directory"):
        files.current()
    assert list(first.path.parent.iterdir()) == [first.path]


def test_a_directory_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"rollout.engine.directory=.*/file/weights"):
        WeightFiles(ScriptedPolicy(), str(tmp_path / "file" / "weights"))


def test_servers_on_a_cpu_are_given_a_tied_output_layer_by_itself(tmp_path):
    policy = Policy(tiny_model("qwen2", tie_word_embeddings=True), letter_tokenizer())
    (tmp_path / "with").mkdir()
    (tmp_path / "without").mkdir()
    policy.save_weights(tmp_path / "with", head=True)
    policy.save_weights(tmp_path / "without")
    head = load_file(tmp_path / "with" / "head.safetensors")
    assert torch.equal(head["lm_head.weight"], policy.causal.get_input_embeddings().weight)
    assert not (tmp_path / "without" / "head.safetensors").exists()


def test_an_output_layer_of_its_own_is_not_written_twice(tmp_path):
    policy = Policy(tiny_model("qwen2", tie_word_embeddings=False), letter_tokenizer())
    policy.save_weights(tmp_path, head=True)
    assert not (tmp_path / "head.safetensors").exists()


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("head", [False, True])
def test_servers_are_sent_the_tensors_that_are_written_to_files(tmp_path, name, head):
    policy = Policy(architecture_model(name), letter_tokenizer())
    policy.save_weights(tmp_path, head=head)
    written = {}
    for path in tmp_path.glob("*.safetensors"):
        written |= load_file(path)
    sent = policy.named_weights(head=head)
    assert len(sent) == len(dict(sent)) == len(written)
    for key, weight in sent:
        assert weight.dtype == written[key].dtype
        assert torch.equal(weight, written[key])
    assert {weight.data_ptr() for _, weight in sent} == {weight.data_ptr() for weight in policy.saved_weights()}
