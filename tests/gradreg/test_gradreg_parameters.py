"""The perturbed set: by the module a parameter belongs to, whatever its name is and whatever is wrapped around it."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    JambaConfig,
    JambaForCausalLM,
    Qwen2Config,
    Qwen2ForSequenceClassification,
    T5Config,
    T5ForConditionalGeneration,
)

from flatpeak.errors import UserError
from flatpeak.gradreg.parameters import block_lists, choose_parameters
from support.gradreg import Around, chosen, network, settings, transformer

SIZES: dict[str, Any] = {
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "pad_token_id": 0,
}


def left_out(model, perturbed="blocks"):
    inside = set(chosen(model, perturbed))
    return [name for name, _ in model.named_parameters() if name not in inside]


def gpt2(**changes):
    return GPT2LMHeadModel(GPT2Config(vocab_size=16, n_embd=8, n_layer=2, n_head=2, n_positions=8, **changes))


def test_gpt2_s_embeddings_and_tied_head_are_left_out_and_nothing_else():
    model = gpt2()
    assert model.lm_head.weight is model.transformer.wte.weight
    assert left_out(model) == [
        "transformer.wte.weight",
        "transformer.wpe.weight",
        "transformer.ln_f.weight",
        "transformer.ln_f.bias",
    ]
    assert "transformer.h.0.attn.c_proj.weight" in chosen(model)
    assert "transformer.h.1.mlp.c_fc.bias" in chosen(model)


@pytest.mark.parametrize("tied", [True, False])
def test_qwen2_s_embeddings_head_and_last_norm_are_left_out(tied):
    model = transformer(tie_word_embeddings=tied)
    head = [] if tied else ["lm_head.weight"]
    assert left_out(model) == ["model.embed_tokens.weight", "model.norm.weight", *head]


def test_an_encoder_s_attention_output_is_inside_and_its_classifier_is_not():
    model = BertForSequenceClassification(BertConfig(**SIZES, max_position_embeddings=8))
    inside = chosen(model)
    assert "bert.encoder.layer.0.attention.output.dense.weight" in inside
    assert "bert.encoder.layer.1.output.dense.bias" in inside
    assert {name.split(".")[-2] for name in left_out(model) if "embeddings" not in name} == {"dense", "classifier"}
    assert "bert.pooler.dense.weight" in left_out(model)


def test_a_reward_model_s_score_is_left_out():
    model = Qwen2ForSequenceClassification(Qwen2Config(**SIZES, num_key_value_heads=1, num_labels=1))
    assert left_out(model) == ["model.embed_tokens.weight", "model.norm.weight", "score.weight"]


def test_an_encoder_and_a_decoder_are_both_inside():
    model = T5ForConditionalGeneration(T5Config(vocab_size=16, d_model=8, d_ff=8, d_kv=4, num_layers=2, num_heads=2))
    assert left_out(model) == ["shared.weight", "encoder.final_layer_norm.weight", "decoder.final_layer_norm.weight"]


def test_blocks_of_two_kinds_in_one_list_are_blocks():
    # Attention and state-space layers take turns, in classes of their own.
    config = JambaConfig(
        **SIZES,
        num_key_value_heads=1,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        num_experts=2,
        mamba_d_state=4,
        mamba_dt_rank=4,
    )
    model = JambaForCausalLM(config)
    assert len({type(layer) for layer in model.model.layers}) == 2
    assert left_out(model) == ["model.embed_tokens.weight", "model.final_layernorm.weight", "lm_head.weight"]


def test_a_list_of_unrelated_modules_is_no_list_of_blocks():
    model = network()
    model.ends = nn.ModuleList([nn.Embedding(3, 6), nn.Linear(6, 3)])
    assert block_lists(model) == [model.blocks]


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)


class Routed(nn.Module):
    """A block with a list of experts of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 3)
        self.experts = nn.ModuleList(Expert() for _ in range(3))


class Mixture(nn.Module):
    def __init__(self, *, kinds: int = 1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        mixed = type("Other", (Routed,), {})
        self.layers = nn.ModuleList(mixed() if kinds == 2 and index % 2 else Routed() for index in range(3))
        self.output = nn.Linear(4, 5)


def test_of_lists_inside_lists_the_outer_ones_are_the_blocks():
    model = Mixture()
    assert block_lists(model) == [model.layers]
    assert left_out(model) == ["embedding.weight", "output.weight", "output.bias"]


def test_experts_are_never_taken_for_the_blocks_they_are_in():
    model = Mixture(kinds=2)
    assert "layers.0.gate.weight" in chosen(model)
    assert left_out(model) == ["embedding.weight", "output.weight", "output.bias"]


def test_everything_is_everything_trainable():
    model = transformer()
    model.model.embed_tokens.weight.requires_grad_(False)
    assert left_out(model, "all") == ["model.embed_tokens.weight"]


def test_the_last_block_is_the_last_of_its_list():
    names = chosen(transformer(), "last_block")
    assert names
    assert all(name.startswith("model.layers.1.") for name in names)


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (transformer(), ["lm_head.weight"]),
        (transformer(tie_word_embeddings=True), ["model.embed_tokens.weight"]),
        (Qwen2ForSequenceClassification(Qwen2Config(**SIZES, num_key_value_heads=1)), ["score.weight"]),
        (network(), ["head.weight", "head.bias"]),
    ],
    ids=["head", "tied", "score", "linear"],
)
def test_the_last_layer_is_the_output_layer(model, names):
    assert chosen(model, "last_layer") == names
    assert chosen(Around(model), "last_layer") == [f"module.{name}" for name in names]


@pytest.mark.parametrize(
    "wrap", [lambda model: model, lambda model: Around(model), lambda model: Around(Around(model))]
)
def test_the_output_layer_is_what_the_model_calls_so_and_not_its_last_linear_layer(wrap):
    model = transformer()
    model.value_head = nn.Linear(8, 1)
    assert choose_parameters(wrap(model), settings(perturbed="last_layer")) == [model.lm_head.weight]


def test_frozen_parameters_are_left_out():
    model = transformer()
    for p in model.model.layers[0].parameters():
        p.requires_grad_(False)
    assert all(name.startswith("model.layers.1.") for name in chosen(model))
    assert chosen(model) == chosen(model, "last_block")
    assert all(".1." in name for name in chosen(model, ("*.mlp.*",)))


class Params4bit(nn.Parameter):
    """Named as bitsandbytes names its own."""


@pytest.mark.parametrize("perturbed", ["all", "blocks", ("*.linear.weight",)])
def test_quantized_weights_are_refused(perturbed):
    model = network()
    model.blocks[1].linear.weight = Params4bit(torch.ones(6, 6))
    with pytest.raises(UserError, match=r"blocks\.1\.linear\.weight is quantized.*perturbed=adapters"):
        chosen(model, perturbed)
    assert "blocks.0.linear.weight" in chosen(model, ("blocks.0.*",))


def test_quantized_weights_that_are_frozen_are_simply_left_out():
    model = network()
    model.blocks[1].linear.weight = Params4bit(torch.ones(6, 6), requires_grad=False)
    assert left_out(model, "all") == ["blocks.1.linear.weight"]


@pytest.mark.parametrize(
    ("model", "perturbed", "fix"),
    [
        (nn.Linear(2, 2), "blocks", "perturbed=blocks: .* use all, adapters or a pattern"),
        (nn.Linear(2, 2), "last_block", "perturbed=last_block: .* use all, adapters or a pattern"),
        (nn.Sequential(nn.Tanh()), "all", "the model has no trainable parameter"),
        (nn.Linear(2, 2).requires_grad_(False), "blocks", "the model has no trainable parameter"),
        (nn.Embedding(2, 2), "last_layer", "use blocks, all or a pattern"),
        (network(), "adapters", "add one with peft, or use blocks"),
    ],
)
def test_a_selection_of_nothing_says_what_to_choose_instead(model, perturbed, fix):
    with pytest.raises(UserError, match=fix):
        chosen(model, perturbed)
