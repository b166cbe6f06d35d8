"""Architectures that flatpeak's attention does not serve fall back, and are right there; none is silently wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.utils import prune

from flatpeak.errors import UserError
from flatpeak.policy import compatibility as support
from flatpeak.policy.model import Policy
from support.architectures import COMMON
from support.models import tiny_model
from support.policies import Tokenizer, gradients, largest_gap, plain_logprobs, tokens_and_weights, uneven_batch

SPECIAL = {key: COMMON[key] for key in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")}
GPT_NEO = {
    **SPECIAL,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "attention_types": [[["global", "local"], 1]],
    "window_size": 4,
    "max_position_embeddings": 128,
}
BLOOM = {**SPECIAL, "hidden_size": 32, "n_layer": 2, "n_head": 4}
FALCON = {**SPECIAL, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "alibi": True}
GPTJ = {**SPECIAL, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "rotary_dim": 4}
GPT_OSS = {
    **COMMON,
    "head_dim": 16,
    "num_hidden_layers": 2,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention"],
}
DYNAMIC = {**COMMON, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}}
UNSERVED: dict[str, tuple[str, dict[str, Any], str]] = {
    "bloom": ("bloom", BLOOM, "not tested"),
    "falcon": ("falcon", FALCON, "not tested"),
    "gpt_neo": ("gpt_neo", GPT_NEO, "not tested"),
    "gptj": ("gptj", GPTJ, "not tested"),
    "gpt_oss": ("gpt_oss", GPT_OSS, "not tested"),
    "dynamic rope": ("llama", DYNAMIC, "longest sequence"),
}


@pytest.mark.parametrize("context", [2, 3, 7, 8])
@pytest.mark.parametrize("decoder", ["gpt2", "llama"])
def test_a_model_is_probed_within_its_context(decoder: str, context: int) -> None:
    settings = COMMON | {"max_position_embeddings": context}
    assert Policy(tiny_model(decoder, scale=3.0, **settings).eval(), Tokenizer()).notice is None


@pytest.mark.parametrize("name", UNSERVED)
def test_an_unserved_architecture_falls_back_with_a_notice_and_scores_right(name: str) -> None:
    model_type, settings, reason = UNSERVED[name]
    policy = Policy(tiny_model(model_type, scale=3.0, **settings).eval(), Tokenizer())
    assert not policy.native
    assert reason in str(policy.notice)
    batch = uneven_batch()
    weights_T = tokens_and_weights(batch)
    padded_T, entropy_T = policy.token_logprobs(batch, temperature=0.7)
    padded = gradients(policy, (weights_T * padded_T).sum())
    plain_T = plain_logprobs(policy, batch, 0.7)
    torch.testing.assert_close(padded_T, plain_T, atol=1e-5, rtol=1e-5)
    assert largest_gap(padded, gradients(policy, (weights_T * plain_T).sum())) < 1e-5
    assert bool((entropy_T > 0).all())


# transformers 5.24 gives GPT-J the attention interface: the probe finds nothing wrong with it there.
@pytest.mark.parametrize("name", ["bloom", "falcon", "gpt_neo", "gpt_oss"])
def test_the_probe_refuses_what_the_list_would_let_through(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model_type, settings, _ = UNSERVED[name]
    monkeypatch.setattr(support, "PROVEN", support.PROVEN | {model_type})
    policy = Policy(tiny_model(model_type, **settings).eval(), Tokenizer())
    assert not policy.native
    assert policy.notice


def test_the_probe_refuses_a_head_that_is_not_the_hidden_state_times_its_weight() -> None:

    model = tiny_model("gpt2", **COMMON).eval()
    original = model.forward

    def doubled(*args: Any, **kwargs: Any) -> Any:
        output = original(*args, **kwargs)
        output.logits = output.logits * 2
        return output

    model.forward = doubled
    policy = Policy(model, Tokenizer())
    assert not policy.native
    assert "differ from the plain forward pass" in str(policy.notice)


@pytest.mark.parametrize(("factor", "native"), [(1.0, True), (0.1, False)])
def test_a_hook_on_the_output_layer_that_changes_logits_takes_the_plain_forward_pass(
    factor: float, native: bool
) -> None:
    """Training multiplies by the layer's weights, and would not call it."""
    model = tiny_model("llama", scale=5.0, **COMMON).eval()
    model.lm_head.register_forward_hook(lambda module, given, found: factor * found)
    policy = Policy(model, Tokenizer())
    assert policy.native == native
    batch = uneven_batch()
    logprobs_T, _ = policy.token_logprobs(batch, temperature=0.7)
    torch.testing.assert_close(logprobs_T, plain_logprobs(policy, batch, 0.7), atol=1e-5, rtol=1e-5)


def test_an_output_layer_whose_weight_is_computed_at_each_call_is_refused() -> None:
    model = tiny_model("llama", **COMMON)
    prune.random_unstructured(model.lm_head, "weight", amount=0.5)
    with pytest.raises(UserError, match=r"output layer is computed at each call .*: call prune\.remove"):
        Policy(model, Tokenizer())


@pytest.mark.parametrize(("kind", "name"), [("opt", "layerdrop"), ("mixtral", "jitter_noise")])
def test_layers_that_are_left_out_and_noise_of_routers_are_silent_too(kind: str, name: str) -> None:
    settings = {"opt": {"ffn_dim": 24, "word_embed_proj_dim": COMMON["hidden_size"], "dropout": 0.0}}
    model = tiny_model(kind, **{**COMMON, **settings.get(kind, {})})
    holders = [module for module in model.modules() if hasattr(module, name)]
    assert holders
    for module in holders:
        setattr(module, name, 0.5)
    policy = Policy(model, Tokenizer())
    first_T, second_T = (policy.token_logprobs(uneven_batch(), temperature=1.0)[0] for _ in range(2))
    assert torch.equal(first_T, second_T)
    policy.release()
    assert {getattr(module, name) for module in holders} == {0.5}


def test_a_plain_forward_pass_on_a_held_model_is_refused_rather_than_wrong() -> None:
    policy = Policy(tiny_model("llama", **COMMON).eval(), Tokenizer())
    with pytest.raises(RuntimeError, match="plain_attention"):
        policy.model(input_ids=torch.tensor([[2, 3, 4]]))
    policy.release()
    assert policy.model(input_ids=torch.tensor([[2, 3, 4]])).logits.shape == (1, 3, 40)
