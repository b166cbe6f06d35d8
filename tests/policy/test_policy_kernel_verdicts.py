"""Verdicts of self-tests in the cache: what is tested again, and a cache that is damaged or missing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from flatpeak.kernels.native.build import UnavailableError, library
from flatpeak.policy import kernel_verdicts, native_decoding
from flatpeak.policy.kernel_verdicts import remembered
from flatpeak.policy.model import Policy
from flatpeak.policy.native_decoding import SETTING
from support.architectures import COMMON
from support.engines import Tokens
from support.models import tiny_model

try:
    library()
except UnavailableError as unavailable:
    pytest.skip(str(unavailable), allow_module_level=True)


@pytest.fixture(autouse=True)
def kernels(one_thread: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice left open, whatever the suite runs with."""
    monkeypatch.delenv(SETTING, raising=False)


@pytest.fixture
def tested(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the self-tests that have been made so far."""
    calls: list[str] = []
    for name in ("largest_gap", "largest_gaps"):
        test = getattr(native_decoding, name)
        monkeypatch.setattr(native_decoding, name, lambda *given, n=name, t=test: calls.append(n) or t(*given))
    return calls


def make(seed: int = 0, **settings: int) -> Policy:
    return Policy(tiny_model("qwen2", seed=seed, scale=2.0, **(COMMON | settings)).eval(), Tokens())  # type: ignore[arg-type]


def start(policy: Policy) -> tuple[bool, bool]:
    """Whether kernels decode and train a policy, as a run asks at its start."""
    return policy.kernels.pack(policy) is not None, policy.kernels.trains(policy)


def test_a_second_start_tests_nothing_and_another_shape_everything(tested: list[str]) -> None:
    both = ["largest_gap", "largest_gaps"]
    assert start(make()) == (True, True)
    assert tested == both
    assert start(make(seed=1)) == (True, True)
    assert tested == both
    assert start(make(intermediate_size=24)) == (True, True)
    assert tested == 2 * both


def test_other_threads_and_other_trainable_weights_are_other_tests(tested: list[str]) -> None:
    start(make())
    frozen = make()
    frozen.trunk.embed_tokens.weight.requires_grad_(False)
    start(frozen)
    torch.set_num_threads(2)
    start(make())
    assert tested == 3 * ["largest_gap", "largest_gaps"]


def test_weights_that_are_not_finite_and_hooks_are_refused_whatever_was_said_before() -> None:
    start(make())
    damaged, hooked = make(), make()
    with torch.no_grad():
        damaged.trunk.layers[1].mlp.down_proj.weight[0, 0] = torch.nan
    assert start(damaged) == (False, False)
    assert damaged.kernels.reason == "the model's logits are NaN or infinite"
    hooked.trunk.layers[0].mlp.register_forward_hook(lambda *given: None)
    assert hooked.kernels.pack(hooked) is None
    assert hooked.kernels.reason == "a Qwen2MLP has a hook"


def test_weights_that_failed_decide_nothing_for_others_of_their_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:  # as those of a run that has diverged
        patch.setattr(native_decoding, "largest_gap", lambda policy, packed: 1.5)
        patch.setattr(native_decoding, "largest_gaps", lambda policy: (0.1, 19.0))
        assert start(make()) == (False, False)
    assert start(make()) == (True, True)


def _damage(file: Path) -> None:
    file.write_bytes(b"\xff\xfe")


def _cut(file: Path) -> None:
    file.write_text("pass")


def _bar(file: Path) -> None:
    file.unlink()
    file.mkdir()


@pytest.mark.parametrize("harm", [_damage, _cut, _bar])
def test_a_cache_that_cannot_be_read_is_ignored(harm: Callable[[Path], None]) -> None:
    policy, answers = make(), iter([True, False])
    assert remembered("a test", policy, lambda: next(answers))
    assert remembered("a test", policy, lambda: next(answers))
    (file,) = kernel_verdicts.cache_folder().iterdir()
    harm(file)
    assert not remembered("a test", policy, lambda: next(answers))


def test_without_a_folder_every_start_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> Path:
        raise UnavailableError("others may write to it")

    monkeypatch.setattr(kernel_verdicts, "cache_folder", refuse)
    policy, answers = make(), iter([True, False])
    assert [remembered("a test", policy, lambda: next(answers)) for _ in range(2)] == [True, False]
