"""Loading of policies: existing models with their tokenizers, or new models with random weights.

`load_policy` takes the `model` section of a recipe. The tokenizer of a new model is built from the task's text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from flatpeak.errors import UserError, brief
from flatpeak.policy.config import ModelConfig, NewModelConfig, TokenizerConfig
from flatpeak.policy.model import Policy
from flatpeak.utils.adapter_base import ADAPTER_CONFIG, named_base, read_record
from flatpeak.utils.adapters import LoraConfig, add_adapters, restore_adapter
from flatpeak.utils.gguf import SUFFIX, find_gguf
from flatpeak.utils.huggingface import (
    has_tokenizer,
    is_surely_local,
    load_errors,
    load_tokenizer,
    local_or_hub,
    no_load_report_before_errors,
    pick_device,
)
from flatpeak.utils.quantization import disable_repacking, loading_options

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"


def load_policy(config: ModelConfig, *, texts: Iterable[str] = (), seed: int = 0) -> Policy:
    """Load the policy of a recipe. A new tokenizer is built from `texts`, and new weights are drawn from `seed`."""
    device = pick_device(config.device, where="model.device")
    dtype: torch.dtype = getattr(torch, config.dtype)
    if config.new is not None:
        model, tokenizer = make_model(config.new, texts=texts, seed=seed)
        if dtype != torch.float32:
            cast_weights(model, dtype)
    else:
        check_source(config)
        config = adapter_source(config)
        model, tokenizer = load_pretrained(config, dtype=dtype, device=device)
        if config.lora is not None:
            model = add_adapters(model, config.lora, seed=seed, revision=config.revision)
    if config.quantization is None:
        model = model.to(device)
    adapter_dropout = config.lora is not None and config.lora.dropout > 0
    return Policy(model, tokenizer, dropout=config.dropout, adapter_dropout=adapter_dropout)


def check_source(config: ModelConfig, *, tokenizer: bool = True) -> None:
    """Raise UserError if a recipe gives no model or a missing directory, without contacting the Hub.

    A directory must have config.json or an adapter's settings, and a tokenizer unless `tokenizer` is false.
    """
    if config.new is not None:
        return
    if config.path is None:
        raise UserError("the recipe gives no model: set model.path (a directory or Hub name), or model.new")
    directory = Path(config.path).expanduser()
    if directory.is_file() and directory.suffix != SUFFIX:
        raise UserError(
            f"model.path={config.path} is a file: give the directory with config.json and the weights, or a GGUF file"
        )
    if is_surely_local(config.path) and not directory.exists():
        raise UserError(f"model.path={config.path}: no such directory or GGUF file")
    if directory.is_dir() and find_gguf(config.path) is None:
        _check_files(config.path, directory, tokenizer=tokenizer)


def adapter_source(config: ModelConfig) -> ModelConfig:
    """The configuration to load `model.path`: if that is an adapter, its base model with the adapter on it.

    UserError if the adapter's base is unknown, or if the recipe asks for further adapters.
    """
    directory = Path(config.path or "").expanduser()
    if config.path is None or not (directory / ADAPTER_CONFIG).is_file():
        return config
    check_single_adapter(config)
    base, revision = named_base(directory, where="model.path")
    record = read_record(directory)
    return config.model_copy(
        update={
            "path": base,
            "revision": revision,
            "lora": LoraConfig(adapter=config.path, dropout=config.lora.dropout if config.lora else 0.0),
            "quantization": config.quantization or (record.quantization if record else None),
        }
    )


def check_single_adapter(config: ModelConfig) -> None:
    """Raise UserError if `model.path` is an adapter and `model.lora` asks for another."""
    if config.lora is not None and config.lora.asks_for_new:
        raise UserError(
            f"model.path={config.path} is already an adapter: remove model.lora to train it further, or give its base "
            "as model.path to start with another adapter"
        )


def resumed_source(config: ModelConfig, checkpoint: Path) -> ModelConfig:
    """The configuration to load a run's model from a checkpoint: the whole model, or its adapters on their base."""
    config = adapter_source(config)
    if config.lora is None:
        return config.model_copy(update={"path": str(checkpoint), "new": None, "revision": None})
    adapter = LoraConfig(adapter=str(checkpoint), dropout=config.lora.dropout)
    return config.model_copy(update={"lora": adapter})


def _check_files(path: str, directory: Path, *, tokenizer: bool) -> None:
    """Raise UserError if a directory has no model, or no tokenizer, which transformers would then make up."""
    if (directory / ADAPTER_CONFIG).is_file():
        return  # it names the base model, which has the other files
    if not (directory / "config.json").is_file():
        checkpoints = directory / "checkpoints"
        hint = f"; did you mean {checkpoints / 'best'}?" if (checkpoints / "best").is_dir() else ""
        raise UserError(
            f"model.path={path}: the directory has no config.json, so it has no model; give a directory that "
            f"save_pretrained has written, or a Hub name{hint}"
        )
    if tokenizer and not has_tokenizer(directory):
        raise UserError(f"model.path={path}: the directory has a model but no tokenizer; copy tokenizer.json into it")


def load_pretrained(config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> tuple[Any, Any]:
    """Load an existing model and its tokenizer; the files must have all of the model's weights.

    An adapter in `config.lora` is not loaded, but the tokenizer of its directory is used if it has one.
    """
    assert config.path is not None  # check_source
    source = {"revision": config.revision or "main", "trust_remote_code": config.trust_remote_code}
    adapter = Path(config.lora.adapter).expanduser() if config.lora and config.lora.adapter else None
    with no_load_report_before_errors():
        with load_errors(config.path, where="model.path"):
            path = local_or_hub(config.path, revision=config.revision)
            if adapter is not None and has_tokenizer(adapter):
                tokenizer = load_tokenizer(str(adapter), trust_remote_code=config.trust_remote_code)
            else:
                tokenizer = load_tokenizer(path, **source)
            settings = AutoConfig.from_pretrained(path, **source)
            # transformers would drop the head of a reward model, and generate text without it.
            heads = [name for name in settings.architectures or () if name.endswith("ForSequenceClassification")]
            if heads:
                raise UserError(
                    f"{heads[0]} is a reward model, which scores answers but writes none; give a language model"
                )
            quantized = is_quantized(settings, config)
            model, report = AutoModelForCausalLM.from_pretrained(
                path,
                **source,
                dtype=dtype,
                **loading_options(config.quantization, dtype=dtype, device=device, done=quantized),
                output_loading_info=True,
                # Without this the error names no weights; packed weights have different sizes.
                ignore_mismatched_sizes=not quantized,
            )
        _check_complete(config, model, report)
    if getattr(model, "_hf_peft_config_loaded", False):
        raise UserError(
            f"model.path={config.path} is an adapter: set model.path to its base and model.lora.adapter={config.path}"
        )
    disable_repacking(model)
    move_to_own_memory(model)
    model.name_or_path = config.path  # adapters store it as their base
    return model, tokenizer


def _check_complete(config: ModelConfig, model: Any, report: Mapping[str, Any]) -> None:
    """Raise UserError if a model's files lack weights, or have them in other shapes."""
    for name, in_file, by_config in sorted(report["mismatched_keys"]):
        raise UserError(
            f"model.path={config.path} does not load: {name} is {list(in_file)} in its files but {list(by_config)} in "
            "config.json, which belongs to another model; copy both from the same source"
        )
    missing = sorted(report["missing_keys"])
    if missing:
        # transformers draws missing weights at random and only logs it.
        names = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise UserError(
            f"model.path={config.path} lacks weights of {type(model).__name__}: {names}; give a complete checkpoint of "
            "a causal language model"
        )


def is_quantized(shape: Any, config: ModelConfig) -> bool:
    """Whether a model is quantized according to config.json; UserError if a recipe with adapters disagrees."""
    quantized = hasattr(shape, "quantization_config")
    if quantized and config.lora is not None and config.quantization is None:
        raise UserError(
            f"model.path={config.path} has quantized weights: if they are bitsandbytes NF4, set "
            "model.quantization=nf4; otherwise give the model before quantization"
        )
    return quantized


def move_to_own_memory(model: torch.nn.Module) -> None:
    """Copy every weight and buffer to memory that torch has allocated, which is aligned.

    Weights from a file are not aligned, so small products sum in another order: a run whose weights were created or
    trained in memory would differ in its last bits from a run that has loaded them. Tied weights stay tied.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()


def make_model(config: NewModelConfig, *, texts: Iterable[str], seed: int) -> tuple[Any, Any]:
    """Create a tokenizer from `texts`, and a model with random weights for it. The caller's RNG does not change."""
    tokenizer = build_tokenizer(config.tokenizer, texts)
    model_config = new_shape(config, tokenizer)
    try:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(model_config, dtype=torch.float32)
        with torch.no_grad():
            token = torch.tensor([[tokenizer.eos_token_id]])
            model(input_ids=token, attention_mask=torch.ones_like(token))
    except (ValueError, TypeError, KeyError, RuntimeError, StrictDataclassError) as error:
        # Sizes that do not match fail only when the model runs.
        raise UserError(f"model.new cannot be built: {misfit(model_config, config.config) or brief(error)}") from error
    return model, tokenizer


def new_shape(config: NewModelConfig, tokenizer: Any) -> Any:
    """The transformers configuration of a new model for its tokenizer."""
    special = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    try:
        return AutoConfig.for_model(config.architecture, **{"vocab_size": len(tokenizer), **special, **config.config})
    except (ValueError, TypeError, KeyError, RuntimeError, StrictDataclassError) as error:
        raise UserError(f"model.new cannot be built: {brief(error)}") from error


def misfit(config: Any, written: Mapping[str, Any]) -> str | None:
    """The sizes of a transformers config that do not match; checks only the usual ones."""
    hidden, heads, shared = (
        getattr(config, name, None) for name in ("hidden_size", "num_attention_heads", "num_key_value_heads")
    )
    if hidden and heads and hidden % heads and "head_dim" not in written:
        return f"model.new.config.hidden_size={hidden} is not a multiple of num_attention_heads={heads}"
    if heads and shared and heads % shared:
        return f"model.new.config.num_attention_heads={heads} is not a multiple of num_key_value_heads={shared}"
    return None


def cast_weights(model: Any, dtype: torch.dtype) -> None:
    """Give a new model the weights that `from_pretrained(dtype=...)` would load after saving it in float32.

    `model.to(dtype)` would round buffers too: with rotary frequencies in bfloat16, the rotation at position 1000 is off
    by radians.
    """
    kept = tuple(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    for name, parameter in model.named_parameters():
        if not any(pattern in name for pattern in kept):
            parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype


def build_tokenizer(config: TokenizerConfig, texts: Iterable[str]) -> Any:
    """Build a transformers tokenizer from `texts`: one token per character, or byte-level BPE with single digits."""
    backend = _characters(texts) if config.type == "characters" else _bpe(texts, config.vocab_size)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
    )


def _characters(texts: Iterable[str]) -> Tokenizer:
    characters = sorted(set().union(*texts))
    vocabulary = {token: index for index, token in enumerate([PAD, EOS, UNKNOWN, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def _bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token=None))
    # With single digits, a small model can see the columns of a number.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, EOS, UNKNOWN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def restore_weights(model: Any, directory: Path) -> None:
    """Load a checkpoint's weights into a model of the same shape; only the adapter if the model has one.

    The model's class reads them, so that code from the Hub (trust_remote_code) is not imported a second time.
    """
    if hasattr(model, "peft_config"):
        restore_adapter(model, directory)
    else:
        # The most precise type in the model, because transformers reads a file of several types in the type that its
        # config names.
        dtype = reduce(torch.promote_types, {p.dtype for p in model.parameters() if p.is_floating_point()})
        saved = type(model).from_pretrained(directory, dtype=dtype)
        model.load_state_dict(saved.state_dict())
