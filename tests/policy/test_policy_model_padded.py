"""The plain forward pass that scores models which the native engine does not serve."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatpeak.policy.model import Policy
from flatpeak.policy.outputs import padded_outputs
from support.architectures import ARCHITECTURES, COMMON
from support.models import tiny_model
from support.policies import Tokenizer, gradients, largest_gap, plain_logprobs, tokens_and_weights, uneven_batch

GPT_NEO = {
    **{name: COMMON[name] for name in ("vocab_size", "hidden_size", "max_position_embeddings", "eos_token_id")},
    "num_layers": 2,
    "num_heads": 4,
    "attention_types": [[["global", "local"], 1]],
    "window_size": 4,
    "bos_token_id": None,
}
COHERE = {**COMMON, "logit_scale": 0.25}
MODELS = {"gpt_neo": ("gpt_neo", GPT_NEO), "cohere": ("cohere", COHERE), "gemma2": ARCHITECTURES["gemma2"]}


@pytest.mark.parametrize("name", MODELS)
def test_the_output_layer_reads_what_predicts_a_response_token_and_nothing_else(name: str) -> None:
    policy = Policy(tiny_model(MODELS[name][0], scale=5.0, **MODELS[name][1]).eval(), Tokenizer())
    batch = uneven_batch()
    rows: list[int] = []
    policy.head.linear.register_forward_hook(lambda module, given, found: rows.append(found.numel() // found.shape[-1]))
    weights_T = tokens_and_weights(batch)
    with policy.plain_attention():
        logprobs_T, entropy_T = padded_outputs(policy.causal, batch, temperature=0.7).logprobs()
    assert rows == [len(batch.tokens_T)]
    assert bool((entropy_T > 0).all())
    padded = gradients(policy, (weights_T * logprobs_T).sum())
    plain_T = plain_logprobs(policy, batch, 0.7)
    plain = gradients(policy, (weights_T * plain_T).sum())
    torch.testing.assert_close(logprobs_T, plain_T, atol=1e-5, rtol=1e-5)
    assert largest_gap(padded, plain) < 1e-5
    assert not policy.head.linear._forward_pre_hooks


class Twisted(nn.Module):
    """A model whose output layer is called in another way than transformers' are."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(40, 8), nn.Linear(8, 40)

    def get_output_embeddings(self) -> nn.Linear:
        return self.head

    def forward(self, input_ids: Tensor, attention_mask: Tensor, use_cache: bool) -> Any:
        hidden = self.embedding(input_ids).cumsum(1)
        return SimpleNamespace(logits=self.head(hidden.transpose(0, 1)).transpose(0, 1))


def test_where_the_output_layer_is_not_given_hidden_states_all_logits_are_made_and_chosen_from() -> None:
    torch.manual_seed(0)
    model, batch = Twisted(), uneven_batch()
    found_T, _ = padded_outputs(model, batch, temperature=1.0).logprobs()
    pieces = []
    for p, tokens in zip(batch.prompt_N.tolist(), batch.tokens_T.split(batch.lengths_N.tolist()), strict=True):
        ids = torch.cat([torch.tensor(batch.prompts[p]), tokens])
        logprobs = torch.log_softmax(model(ids[None], None, False).logits[0], -1)
        pieces.append(logprobs[len(batch.prompts[p]) - 1 : -1].gather(1, tokens[:, None])[:, 0])
    torch.testing.assert_close(found_T, torch.cat(pieces))
