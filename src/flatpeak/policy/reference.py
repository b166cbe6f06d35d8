"""The reference model of the KL terms: a frozen copy of the policy, or another model."""

from __future__ import annotations

import copy
from typing import Any

from flatpeak.errors import UserError
from flatpeak.policy.policy import Policy


def snapshot(policy: Policy) -> Policy:
    """A frozen copy of the policy as it is now, adapters included."""
    with policy.plain_attention() as model:
        duplicate = copy.deepcopy(model)
    duplicate.requires_grad_(False)
    return Policy(duplicate, policy.tokenizer)


def check_reference(policy: Policy, reference: Policy) -> None:
    """Refuse a reference that shares weights with the policy, or that reads other tokens."""
    policy_storages = {parameter.untyped_storage().data_ptr() for parameter in policy.model.parameters()}
    if any(parameter.untyped_storage().data_ptr() in policy_storages for parameter in reference.model.parameters()):
        raise UserError(
            "the reference shares weights with the policy, so KL to it is always 0 and freezing it freezes the "
            "policy: give a copy, or leave reference.model null"
        )
    sizes = [model.head.linear.weight.shape[0] for model in (policy, reference)]
    vocabularies = [_vocabulary(model.tokenizer) for model in (policy, reference)]
    if sizes[0] != sizes[1] or vocabularies[0] != vocabularies[1]:
        raise UserError(
            f"reference.model has another vocabulary ({sizes[1]} tokens, the policy {sizes[0]}): "
            "KL needs a reference with the policy's tokenizer"
        )


def _vocabulary(tokenizer: Any) -> dict[str, int]:
    """Token ids by text; empty for a tokenizer object of the caller's that cannot tell."""
    return dict(tokenizer.get_vocab()) if hasattr(tokenizer, "get_vocab") else {}
