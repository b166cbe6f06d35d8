"""What the self-test of native training passes notices, and models and settings around a pass that stay as they are."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor

from flatpeak.kernels.native.build import UnavailableError, library
from flatpeak.kernels.native.training_pass import Groups
from flatpeak.policy import native_decoding, native_training, training_attention
from flatpeak.policy.linears import Exchanged
from flatpeak.policy.model import Policy
from flatpeak.policy.native_decoding import SETTING
from flatpeak.policy.reference import Snapshot
from support.architectures import COMMON
from support.engines import Tokens, make_policy
from support.models import tiny_model
from support.policies import gradients, uneven_batch

try:
    library()
except UnavailableError as unavailable:
    pytest.skip(str(unavailable), allow_module_level=True)


@pytest.fixture(autouse=True)
def kernels(one_thread: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice left open, whatever the suite runs with; the same random weights."""
    monkeypatch.delenv(SETTING, raising=False)
    torch.manual_seed(1)


@pytest.mark.parametrize("late", [False, True])
def test_a_small_or_late_error_of_attention_is_noticed(late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    attend = training_attention.attention

    def damaged(states: list[Tensor], groups: Groups, scale: float) -> Tensor:
        query, key, value = states
        if not late:
            return attend([query, key.detach() + 0.97 * (key - key.detach()), value], groups, scale)
        rows = torch.cat([torch.arange(first + 48, first + max(48, n)) for first, n in groups.segments.tolist()])
        return attend([query.index_copy(0, rows, query[rows].detach()), key, value], groups, scale)

    monkeypatch.setattr(training_attention, "attention", damaged)
    policy = Policy(tiny_model("llama", scale=1.0, **COMMON), Tokens())  # type: ignore[arg-type]
    assert not policy.kernels.trains(policy)


def test_where_a_pass_by_kernels_fails_torch_computes_and_the_reason_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, batch, calls = make_policy(), uneven_batch(), []
    monkeypatch.setenv(SETTING, "torch")
    plain_T, _ = make_policy().token_logprobs(batch, temperature=1.0)

    def fail(gate: Tensor, up: Tensor) -> Tensor:
        calls.append(gate.shape)
        raise RuntimeError("no such luck")

    monkeypatch.setattr(native_training, "swiglu", fail)
    for _ in range(2):
        logprobs_T, _ = policy.token_logprobs(batch, temperature=1.0)
        assert torch.equal(logprobs_T, plain_T)
    assert len(calls) == 1
    assert policy.kernels.training_reason == "their training pass failed: RuntimeError: no such luck"


def test_where_torchs_own_pass_fails_its_error_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = make_policy()

    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(policy, "packed_logprobs", fail)
    with pytest.raises(ZeroDivisionError):
        policy.kernels.trains(policy)


def test_weights_that_are_nan_are_compared_once_until_they_change(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, compared = make_policy(), []
    compare = native_training.largest_gaps
    monkeypatch.setattr(native_decoding, "largest_gaps", lambda each: compared.append(each) or compare(each))
    weight = policy.trunk.layers[1].mlp.down_proj.weight
    before = weight[0, 0].item()
    with torch.no_grad():
        weight[0, 0] = torch.nan
    for _ in range(3):
        assert not policy.kernels.trains(policy)
    assert len(compared) == 1
    assert policy.kernels.training_reason == "the model's log-probabilities or its gradient are NaN or infinite"
    with torch.no_grad():
        weight[0, 0] = before
    assert policy.kernels.trains(policy)
    assert len(compared) == 2
    assert policy.kernels.training_reason is None


def test_a_frozen_copy_that_is_scored_first_compares_gradients_too(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = native_training.swiglu
    monkeypatch.setattr(native_training, "swiglu", lambda a, b: gate(a, b) + 1e-2 * (b - b.detach()))
    policy = make_policy()
    reference = Snapshot(policy)
    with torch.no_grad():
        reference.token_logprobs(uneven_batch(), temperature=1.0)
    assert not reference.parameters()
    assert not policy.kernels.trains(policy)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_default_type_of_new_tensors_changes_no_bit(dtype: torch.dtype) -> None:
    policy, batch, before = make_policy(), uneven_batch(), torch.get_default_dtype()
    assert policy.kernels.trains(policy)
    plain_T, _ = policy.token_logprobs(batch, temperature=1.0)
    plain = gradients(policy, plain_T.sum())
    torch.set_default_dtype(dtype)
    try:
        logprobs_T, _ = policy.token_logprobs(batch, temperature=1.0)
        assert torch.equal(logprobs_T, plain_T)
        assert all(map(torch.equal, gradients(policy, logprobs_T.sum()), plain))
        assert max(native_training.largest_gaps(policy)) < 1
    finally:
        torch.set_default_dtype(before)


def test_a_held_model_is_pickled_and_copied_with_the_classes_that_it_had() -> None:
    policy = make_policy()
    policy.token_logprobs(uneven_batch(), temperature=1.0)
    for other in (pickle.loads(pickle.dumps(policy.model)), copy.deepcopy(policy.model)):
        assert not any(isinstance(module, Exchanged) for module in other.modules())
        assert all(map(torch.equal, other.parameters(), policy.model.parameters()))
    assert any(isinstance(module, Exchanged) for module in policy.model.modules())


def test_a_model_in_float64_is_left_to_torch_and_so_named() -> None:
    policy = Policy(make_policy().causal.double(), Tokens())  # type: ignore[arg-type]
    assert not policy.kernels.trains(policy)
    assert policy.computed_with == "torch"
