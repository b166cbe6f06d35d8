"""Names: patterns over them, and what wrappers put into them."""

import pytest
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from flatpeak.errors import UserError
from flatpeak.gradreg.parameters import choose_parameters
from support.gradreg import Around, chosen, network, settings, transformer


class Compiled(nn.Module):
    """What torch.compile does to names."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._orig_mod = module


WRAPPINGS = {
    "ddp": Around,
    "compiled": Compiled,
    "ddp around compiled": lambda model: Around(Compiled(model)),
    "compiled around ddp": lambda model: Compiled(Around(model)),
}


@pytest.mark.parametrize("wrap", WRAPPINGS.values(), ids=WRAPPINGS)
@pytest.mark.parametrize("perturbed", ["blocks", "last_block", "all", ("model.layers.*.mlp.*",), ("*.k_proj.bias",)])
def test_wrappers_change_nothing(wrap, perturbed):
    model = transformer()
    plain = choose_parameters(model, settings(perturbed=perturbed))
    assert len(plain) > 1
    wrapped = choose_parameters(wrap(model), settings(perturbed=perturbed))
    assert [id(p) for p in wrapped] == [id(p) for p in plain]


class Checkpointed(nn.Module):
    """What torch's checkpoint_wrapper does to names."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._checkpoint_wrapped_module = module


@pytest.mark.parametrize("wrap", [Compiled, Checkpointed])
def test_names_in_a_model_whose_blocks_are_wrapped_one_by_one_are_plain(wrap):
    model = transformer()
    model.model.layers = nn.ModuleList(wrap(layer) for layer in model.model.layers)
    (result,) = choose_parameters(model, settings(perturbed=("model.layers.0.mlp.up_proj.weight",)))
    assert result.shape == (12, 8)
    assert len(chosen(model)) == len(chosen(transformer()))


def test_patterns_select_by_name_in_the_model_s_order():
    model = transformer()
    assert chosen(model, ("lm_head.*", "*.1.mlp.down_proj.weight", "model.layers.0.mlp.*")) == [
        *(f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
        "model.layers.1.mlp.down_proj.weight",
        "lm_head.weight",
    ]


def test_a_tied_parameter_is_found_by_either_of_its_names():
    model = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_embd=8, n_layer=2, n_head=2, n_positions=8))
    assert chosen(model, ("lm_head.*",)) == chosen(model, ("*.wte.*",)) == ["transformer.wte.weight"]


def test_a_pattern_that_matches_nothing_shows_names_that_would():
    with pytest.raises(UserError, match=r"\*\.atn\.\* matches no trainable parameter; .* blocks\.0\.linear\.weight"):
        chosen(network(), ("*.linear.*", "*.atn.*"))
    frozen = network().requires_grad_(False)
    with pytest.raises(UserError, match="matches no trainable parameter"):
        chosen(frozen, ("*.linear.*",))
