"""The reference is a copy that stays as it was, and never the policy itself."""

from __future__ import annotations

import pytest
import torch

from flatpeak.errors import UserError
from flatpeak.policy.model import Policy
from flatpeak.policy.reference import check_reference, snapshot
from support.architectures import COMMON
from support.models import tiny_model
from support.policies import Tokenizer, uneven_batch


def make_policy(**settings: object) -> Policy:
    return Policy(tiny_model("llama", **COMMON | settings).eval(), Tokenizer())


def test_a_snapshot_agrees_with_the_policy_and_then_stays() -> None:
    policy, batch = make_policy(), uneven_batch()
    reference = snapshot(policy)
    assert reference.native
    with torch.no_grad():
        before_T, _ = policy.token_logprobs(batch, temperature=1.0)
        assert torch.equal(reference.token_logprobs(batch, temperature=1.0)[0], before_T)
        for parameter in policy.parameters():
            parameter.mul_(1.1)
        assert torch.equal(reference.token_logprobs(batch, temperature=1.0)[0], before_T)
        assert not torch.equal(policy.token_logprobs(batch, temperature=1.0)[0], before_T)
    assert reference.parameters() == []


def test_a_reference_that_is_the_policy_is_refused() -> None:
    policy = make_policy()
    with pytest.raises(UserError, match="shares weights"):
        check_reference(policy, policy)


def test_a_reference_that_shares_one_tensor_is_refused() -> None:
    policy = make_policy()
    reference = snapshot(policy)
    reference.head.linear.weight = policy.head.linear.weight
    with pytest.raises(UserError, match="shares weights"):
        check_reference(policy, reference)


def test_a_reference_with_another_vocabulary_is_refused() -> None:
    with pytest.raises(UserError, match="another vocabulary"):
        check_reference(make_policy(), make_policy(vocab_size=41))


def test_another_copy_of_the_same_shape_is_fine() -> None:
    policy = make_policy()
    check_reference(policy, snapshot(policy))
