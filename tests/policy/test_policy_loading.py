"""Policies from recipes: new models with tokenizers of their own, saved ones bit for bit, and what is refused."""

from __future__ import annotations

import json
import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForSequenceClassification, BertConfig, BertModel

from flatpeak.errors import UserError
from flatpeak.policy.config import ModelConfig, NewModelConfig, TokenizerConfig
from flatpeak.policy.loading import build_tokenizer, load_policy, make_model
from flatpeak.policy.model import Policy
from flatpeak.utils.control_tokens import end_of_turn

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
}
NEW = ModelConfig(new=NewModelConfig(config=SIZES), device="cpu")
TEXTS = ["12+34=", "46\n"]


def test_a_character_tokenizer_has_one_token_per_character_and_reads_back_what_it_wrote() -> None:
    tokenizer = build_tokenizer(TokenizerConfig(), TEXTS)
    assert len(tokenizer) == 3 + len(set("12+34=46\n"))
    ids = tokenizer.encode("1+2=\n3")
    assert len(ids) == 6
    assert tokenizer.decode(ids) == "1+2=\n3"
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == "1+2=\n3"


def test_a_character_that_was_never_seen_is_the_unknown_token() -> None:
    tokenizer = build_tokenizer(TokenizerConfig(), TEXTS)
    assert tokenizer.encode("x") == [tokenizer.unk_token_id]


def test_a_bpe_tokenizer_keeps_digits_single_and_reads_back_any_text() -> None:
    texts = ["there are 12345 apples in the box"] * 50
    tokenizer = build_tokenizer(TokenizerConfig(type="bpe", vocab_size=300), texts)
    assert len(tokenizer) <= 300
    assert tokenizer.tokenize("12345") == ["1", "2", "3", "4", "5"]
    assert len(tokenizer.encode("there")) < 5
    for text in ("there are 7 apples", "naïve café — 5 €\n\ttabs", "解"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_new_weights_depend_on_the_seed_and_leave_the_callers_random_state_alone() -> None:
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    first, again, other = (load_policy(NEW, texts=TEXTS, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(before, torch.random.get_rng_state())
    weights = [policy.head.linear.weight for policy in (first, again, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_a_saved_policy_loads_bit_for_bit_with_its_tokenizer(tmp_path: Path) -> None:
    policy = load_policy(NEW, texts=TEXTS)
    policy.save(tmp_path)
    loaded = load_policy(ModelConfig(path=str(tmp_path), device="cpu"))
    assert loaded.native
    for (name, saved), (_, result) in zip(
        policy.model.state_dict().items(), loaded.model.state_dict().items(), strict=True
    ):
        assert torch.equal(saved, result), name
    assert loaded.tokenizer.encode("1+2=") == policy.tokenizer.encode("1+2=")
    assert loaded.eos_token_ids == policy.eos_token_ids


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
@pytest.mark.parametrize("kind", ["characters", "bpe"])
def test_a_saved_tokenizer_splits_a_text_as_it_did(architecture: str, kind: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    text = "Sam's 12 apples, 3 left.\n\nHow many?  "
    new = NewModelConfig(
        architecture=architecture,
        config={**sizes, "num_key_value_heads": 1},
        tokenizer=TokenizerConfig(type=kind, vocab_size=300),  # type: ignore[arg-type]
    )
    policy = load_policy(ModelConfig(new=new, device="cpu"), texts=[text])
    policy.save(tmp_path)
    ids = load_policy(ModelConfig(path=str(tmp_path), device="cpu")).tokenizer.encode(text)
    assert ids == policy.tokenizer.encode(text)
    assert policy.tokenizer.decode(ids) == text


def test_every_end_of_sequence_token_counts_wherever_it_is_named() -> None:
    model, tokenizer = make_model(NEW.new, texts=TEXTS, seed=0)
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, 5]
    model.config.eos_token_id = 7
    assert Policy(model, tokenizer).eos_token_ids == {tokenizer.eos_token_id, 5, 7}


@pytest.mark.parametrize(
    ("template", "ends"),
    [
        ("{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}", True),
        ("{% for m in messages %}{{ m.content }} and so on<|im_end|>{% endfor %}", False),
        ("{{ raise_exception('no') }}", False),
        ("<|im_end|>{% for m in messages %}{{ m.content | upper }}{% endfor %}", False),
        ("{% for m in messages %}{{ m.content }}{% endfor %}<|im_end|>", False),
        (None, False),
    ],
)
def test_the_end_of_turn_of_a_chat_template_ends_a_completion_too(template: str | None, ends: bool) -> None:
    model, tokenizer = make_model(NEW.new, texts=TEXTS, seed=0)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    tokenizer.chat_template = template
    own = {tokenizer.convert_tokens_to_ids("<|im_end|>")} if ends else set()
    assert end_of_turn(tokenizer) == next(iter(own), None)
    assert Policy(model, tokenizer).eos_token_ids - {tokenizer.eos_token_id} == own


def test_a_model_without_an_end_of_sequence_token_is_refused() -> None:
    model, tokenizer = make_model(NEW.new, texts=TEXTS, seed=0)
    tokenizer.eos_token = None
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    with pytest.raises(UserError, match="set tokenizer"):
        Policy(model, tokenizer)


def test_dropout_is_off_in_every_module_unless_asked_for() -> None:
    config = NewModelConfig(architecture="gpt2", config={"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32})
    silent = Policy(*make_model(config, texts=TEXTS, seed=0))
    kept = Policy(*make_model(config, texts=TEXTS, seed=0), dropout=True)
    rates = [
        {module.p for module in policy.model.modules() if isinstance(module, torch.nn.Dropout)}
        for policy in (silent, kept)
    ]
    assert rates == [{0.0}, {0.1}]


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ({"path": "./nowhere"}, "no such directory"),
        ({"path": __file__}, "is a file: give the directory with config.json and the weights"),
        ({"new": {"architecture": "qwen99"}}, "model.new cannot be built"),
        ({"new": {"config": {**SIZES, "num_attention_heads": 3}}}, "model.new cannot be built"),
        ({"path": "x", "device": "nonsense"}, "not a torch device"),
    ],
)
def test_a_model_that_cannot_be_had_is_one_clear_error(model: dict[str, object], says: str) -> None:
    with pytest.raises(UserError, match=says):
        load_policy(ModelConfig.model_validate({"device": "cpu", **model}), texts=TEXTS)


def test_a_recipe_names_one_source_of_the_model() -> None:
    with pytest.raises(ValueError, match="not both"):
        ModelConfig.model_validate({"path": "x", "new": {}})
    with pytest.raises(UserError, match="the recipe gives no model"):
        load_policy(ModelConfig())


def save_tiny(directory: Path, *, tied: bool = False, dtype: str = "float32") -> None:
    sizes = {**SIZES, "tie_word_embeddings": tied}
    load_policy(
        ModelConfig(new=NewModelConfig(config=sizes), device="cpu", dtype=dtype),  # type: ignore[arg-type]
        texts=TEXTS,
    ).save(directory)


def test_a_reward_model_is_refused_as_a_policy_even_where_its_embeddings_could_write(tmp_path: Path) -> None:
    save_tiny(tmp_path, tied=True)
    settings = AutoConfig.from_pretrained(tmp_path, num_labels=1)
    AutoModelForSequenceClassification.from_config(settings).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"LlamaForSequenceClassification is a reward model, which scores"):
        load_policy(ModelConfig(path=str(tmp_path), device="cpu"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_read_from_a_file_lie_where_torch_would_have_put_them(dtype: str, tmp_path: Path) -> None:
    save_tiny(tmp_path, dtype=dtype)
    model = load_policy(ModelConfig(path=str(tmp_path), device="cpu", dtype=dtype)).model  # type: ignore[arg-type]
    own = {name: tensor.data_ptr() % 64 for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    assert set(own.values()) == {0}, own


def test_tied_weights_of_a_file_stay_tied(tmp_path: Path) -> None:
    save_tiny(tmp_path, tied=True)
    model = load_policy(ModelConfig(path=str(tmp_path), device="cpu")).model
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.lm_head.weight.data_ptr() % 64 == 0


class Call:
    """A pickle of this touches a file where it is opened without care."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_a_model_that_lacks_weights_is_refused_by_their_names(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    save_tiny(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors, tmp_path / "all.safetensors")
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"lacks weights of \w+: model\.layers\.0\.mlp\.up_proj\.weight; give a comp"):
        load_policy(ModelConfig(path=str(tmp_path), device="cpu"))
    assert not caplog.records  # transformers' table of the same
    save_file(load_file(tmp_path / "all.safetensors") | {"other": torch.ones(1)}, tmp_path / "model.safetensors")
    load_policy(ModelConfig(path=str(tmp_path), device="cpu"))
    assert "LOAD REPORT" in caplog.text


def test_weights_that_are_nan_are_refused_as_damaged(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.norm.weight"].fill_(float("nan"))
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"NaN before any step: its weights are damaged, .* or choose another model$"):
        load_policy(ModelConfig(path=str(tmp_path), device="cpu"))


def test_a_model_with_code_of_its_own_names_the_setting_that_runs_it(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(UserError, match=r"code of its own, .*: set model\.trust_remote_code=true if you trust it$"):
        load_policy(ModelConfig(path=str(tmp_path), device="cpu"))
    assert not (tmp_path / "ran").exists()


def test_a_model_of_another_architecture_is_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    BertModel(BertConfig(**sizes, vocab_size=20)).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"lacks weights of BertLMHeadModel: cls\.predictions"):
        load_policy(ModelConfig(path=str(tmp_path), device="cpu"))


@pytest.mark.parametrize("content", [b"version https://git-lfs.github.com/spec/v1\n", b"\x08\x00\x00"])
def test_damaged_weights_are_one_line(content: bytes, tmp_path: Path) -> None:
    save_tiny(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(UserError, match=r"^model\.path=.* does not load: .+; .* pointer of Git LFS: fetch it again$"):
        load_policy(ModelConfig(path=str(tmp_path), device="cpu"))


def test_pickled_code_is_not_run_and_no_advice_of_torch_to_run_it_is_repeated(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Call(tmp_path / "canary"), protocol=2))
    with pytest.raises(UserError, match=r"holds more than tensors: convert them to safetensors$") as error:
        load_policy(ModelConfig(path=str(tmp_path), device="cpu"))
    assert "weights_only" not in str(error.value)
    assert not (tmp_path / "canary").exists()


def test_a_damaged_tokenizer_says_what_to_do(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"a": ')
    with pytest.raises(UserError, match=r"does not load: .*; one of its \.json files is damaged: fetch it again$"):
        load_policy(ModelConfig(path=str(tmp_path), device="cpu"))


def test_a_directory_without_a_model_is_refused_with_what_it_should_be(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^model\.path=.*: the directory has no config\.json, so it has no model"):
        load_policy(ModelConfig(path=str(tmp_path)))
    (tmp_path / "checkpoints" / "best").mkdir(parents=True)
    with pytest.raises(UserError, match=r"; did you mean .*/checkpoints/best\?$"):
        load_policy(ModelConfig(path=str(tmp_path)))


def test_a_model_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    for file in tmp_path.glob("token*"):
        file.unlink()
    with pytest.raises(UserError, match=r"has a model but no tokenizer; copy tokenizer\.json into it$"):
        load_policy(ModelConfig(path=str(tmp_path)))


def test_weights_of_other_sizes_than_the_config_says_are_named(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    rows, width = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"].shape
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": rows + 5}))
    sizes = rf"\[{rows}, {width}\] in its files but \[{rows + 5}, {width}\] in config"
    with pytest.raises(UserError, match=rf"does not load: \S+\.weight is {sizes}"):
        load_policy(ModelConfig(path=str(tmp_path), device="cpu"))


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"hidden_size": 10, "num_attention_heads": 3}, "hidden_size=10 is not a multiple of num_attention_heads=3"),
        (
            {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 3},
            "num_attention_heads=4 is not a multiple of num_key_value_heads=3",
        ),
        ({"hidden_size": "a"}, r"Field 'hidden_size' expected int, got str \(value: 'a'\)"),
    ],
)
def test_sizes_of_a_new_model_that_do_not_fit_are_named(config: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=rf"^model\.new cannot be built: .*{says}"):
        make_model(NewModelConfig(architecture="qwen2", config=config), texts=["1"], seed=0)
