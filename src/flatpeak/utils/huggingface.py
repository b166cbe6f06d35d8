"""Helpers for everything from Hugging Face: Hub or cache, quiet loading, tokenizers, devices.

Importing it loads neither torch nor transformers.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from flatpeak.errors import UserError, brief
from flatpeak.utils.gguf import SUFFIX, dequantized, find_gguf, names_hub_file

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

PATIENCE: Final = 5.0
"""Seconds for one attempt to connect: by default the Hub's client would try for half a minute."""
_LISTED_PIECES: Final = 10
"""The most unknown substrings that a notice lists."""
_TOKENIZER_FILES: Final = ("*token*", "vocab*", "merges*", "*.model", "*.tiktoken")


@contextmanager
def load_errors(path: str, *, where: str, kind: str = "") -> Iterator[None]:
    """A context for `from_pretrained(path)` in which every failure becomes a UserError that names the setting `where`.

    `kind` is the kind of model that the files should contain. The Hub is asked only if `path` is not a directory.
    Running out of memory is not the files' fault and is raised unchanged.
    """
    with hub_or_directory(path) as problem:
        try:
            yield
        except Exception as error:  # damaged files make transformers, safetensors and pickle raise anything
            import torch

            if isinstance(error, MemoryError | torch.OutOfMemoryError):
                raise
            reason = (
                f"it is not a directory here, {problem}; name one, or check the network"
                if problem
                else _reason(error, where=where)
            )
            raise UserError(f"{where}={path} does not load{kind and f' as {kind}'}: {reason}") from error


def _reason(error: Exception, *, where: str) -> str:
    """The reason for a failed load, with the fix if the files are known to be at fault."""
    from safetensors import SafetensorError

    if isinstance(error, UserError):
        return str(error)  # in full, because its end names the fix
    if "trust_remote_code" in str(error):
        fix = "set model.trust_remote_code=true if you trust it" if where == "model.path" else "name a model without"
        return f"it comes with code of its own, which is not run: {fix}"
    if isinstance(error, SafetensorError):
        return f"{brief(error)}; a file of weights is cut short, damaged, or a pointer of Git LFS: fetch it again"
    if isinstance(error, json.JSONDecodeError):
        return f"{brief(error)}; one of its .json files is damaged: fetch it again"
    if type(error).__name__ == "UnpicklingError":  # from pickle, which is not imported here
        return "its weights are a pickle that is damaged, or holds more than tensors: convert them to safetensors"
    return brief(error)


def load_tokenizer(path: str, **settings: Any) -> Any:
    """The tokenizer of a directory or Hub name; `settings` go to `from_pretrained`.

    If a directory's tokenizer_config.json refers only to tokenizer.json, only that is read: for some model types
    (qwen2) AutoTokenizer splits words as that type's own tokenizer would, ignoring the files.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    return (PreTrainedTokenizerFast if is_self_contained(path) else AutoTokenizer).from_pretrained(path, **settings)


def has_tokenizer(directory: Path) -> bool:
    """Whether a directory has a tokenizer's files."""
    return any(file.is_file() for kind in _TOKENIZER_FILES for file in directory.glob(kind))


def is_self_contained(path: str) -> bool:
    """Whether a directory's tokenizer is completely in tokenizer.json, without a class of its own."""
    config, tokenizer = (Path(path) / name for name in ("tokenizer_config.json", "tokenizer.json"))
    if not (config.is_file() and tokenizer.is_file()):
        return False
    named = json.loads(config.read_text(encoding="utf-8")).get("tokenizer_class")
    return named in ("TokenizersBackend", "PreTrainedTokenizerFast")


def local_or_hub(path: str, *, revision: str | None = None) -> str:
    """The argument of `from_pretrained` for a setting: a directory with `~` expanded, or a Hub name unchanged.

    For a GGUF file, or a directory or Hub name with such a file, it is the directory with the dequantized model.
    """
    file = find_gguf(path, revision=revision)
    if file is not None:
        return str(dequantized(file))
    directory = Path(path).expanduser()
    return str(directory) if directory.is_dir() else path


def is_surely_local(path: str) -> bool:
    """Whether a name can only be a local path: Hub names have at most one slash, and do not begin like this.

    A GGUF file is local unless its name has the form of a file on the Hub.
    """
    if path.endswith(SUFFIX):
        return not names_hub_file(path)
    return path.startswith((".", "/", "~")) or path.count("/") > 1


def unknown_characters(tokenizer: Any, text: str) -> list[str]:
    """The substrings that a tokenizer drops or replaces by its unknown token, each once.

    Empty for a tokenizer without offsets.
    """
    if not getattr(tokenizer, "is_fast", False):
        return []
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    unknown, covered = list[str](), set[int]()
    for token, (start, end) in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True):
        covered.update(range(start, end))
        if token == tokenizer.unk_token_id and end > start:
            unknown.append(text[start:end])
    # After a dropped character, offsets are unreliable: tokenize each character by itself.
    if any(at not in covered and not one.isspace() for at, one in enumerate(text)):
        single = (one for one in text if not one.isspace())
        unknown += [one for one in single if not tokenizer.encode(one, add_special_tokens=False)]
    return list(dict.fromkeys(unknown))


def notice_of_unknown_characters(texts: Sequence[str], tokenizer: Any) -> str | None:
    """A notice about texts with characters that the tokenizer drops or replaces by its unknown token; None if none."""
    # Separated, because a word of all characters would be unknown as a whole. If the tokenizer knows words but not
    # their letters, the texts themselves decide.
    suspects = unknown_characters(tokenizer, " ".join(sorted(set().union(*texts))))
    affected = [
        unknown
        for text in texts
        if any(one in text for one in suspects) and (unknown := unknown_characters(tokenizer, text))
    ]
    if not affected:
        return None
    distinct = list(dict.fromkeys(piece for unknown in affected for piece in unknown))
    listed = " ".join(map(repr, distinct[:_LISTED_PIECES])) + (" ..." if len(distinct) > _LISTED_PIECES else "")
    counts = f"{len(affected)} of {len(texts)} prompts"
    return f"{counts} have characters that the tokenizer lacks and the model cannot see: {listed}"


@contextmanager
def no_progress_bar() -> Iterator[None]:
    """A context without transformers' progress bars when loading and saving, which would overwrite the display."""
    from transformers.utils import logging

    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()


@contextmanager
def no_load_report_before_errors() -> Iterator[None]:
    """A context without transformers' table of weights that do not fit a model, if a UserError says the same.

    In all other cases the table is logged at the end, because an error of transformers may refer to it.
    """
    held: list[logging.LogRecord] = []

    def hold(record: logging.LogRecord) -> bool:
        is_report = "LOAD REPORT" in record.getMessage()
        if is_report:
            held.append(record)
        return not is_report

    logger = logging.getLogger("transformers.modeling_utils")
    logger.addFilter(hold)
    try:
        yield
    except UserError as error:
        if error.__cause__ is None:
            held.clear()
        raise
    finally:
        logger.removeFilter(hold)
        for record in held:
            logger.handle(record)


@contextmanager
def no_warnings() -> Iterator[None]:
    """A context in which transformers logs only errors."""
    from transformers.utils.logging import get_verbosity, set_verbosity, set_verbosity_error

    level = get_verbosity()
    set_verbosity_error()
    try:
        yield
    finally:
        set_verbosity(level)


def pick_device(name: str, *, where: str) -> torch.device:
    """The device for a setting's value: `auto` is cuda if available, else cpu. `where` names the setting."""
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(f"{where}={name}: not a torch device; use auto, cpu or cuda") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"{where}={name}: torch sees no CUDA device; use {where}=cpu or auto")
    return device


@contextmanager
def hub_or_directory(path: str) -> Iterator[str | None]:
    """`hub_or_cache` for a path that may be a directory or a file, in which case the Hub is not asked."""
    if Path(path).expanduser().exists():
        yield None
    else:
        with hub_or_cache() as problem:
            yield problem


@contextmanager
def hub_or_cache() -> Iterator[str | None]:
    """A context in which the Hub is asked; if it does not answer one request, only its local cache.

    Yields None, or the reason why the Hub does not answer, for the error about anything missing in the cache.
    """
    from huggingface_hub import constants  # imported here because a run on local files never needs it

    problem = _problem()
    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = before or problem is not None
    try:
        yield problem
    finally:
        constants.HF_HUB_OFFLINE = before


@contextmanager
def cache_alone() -> Iterator[None]:
    """A context in which nothing is fetched: only the Hub's local cache is used."""
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def _problem() -> str | None:
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set, and it was not fetched before"
    try:
        # Uses the client's session, which knows the proxies. Any reply will do.
        get_session().head(constants.ENDPOINT, timeout=PATIENCE)
    except Exception as error:  # the client's HTTP library may change, and with it the types of errors
        return f"{constants.ENDPOINT} cannot be reached ({str(error).strip() or type(error).__name__})"
    return None


def save_tokenizer(tokenizer: Any, directory: Path) -> None:
    """Write a tokenizer with the same bytes for any origin; transformers marks tokenizers loaded from a directory."""
    for mark in ("is_local", "local_files_only"):
        tokenizer.init_kwargs.pop(mark, None)
    tokenizer.save_pretrained(directory)


def share_weights(directory: Path) -> None:
    """Make weights as readable as their directory: safetensors makes them readable only by their owner."""
    mode = directory.stat().st_mode & 0o666
    for path in directory.rglob("*.safetensors"):
        with suppress(PermissionError):  # a network file system without modes
            path.chmod(mode)


def save_model(model: Any, directory: Path, *, head: nn.Linear | None) -> None:
    """Write a model in Hugging Face format; `head`: a tied output layer to write separately as well."""
    from safetensors.torch import save_file

    with no_progress_bar():
        model.save_pretrained(directory)
    if tied := tied_head(model, head):
        save_file(
            {name: weight.cpu().contiguous() for name, weight in tied},
            directory / "head.safetensors",
            metadata={"format": "pt"},
        )


def named_weights(model: Any, *, head: nn.Linear | None) -> list[tuple[str, Tensor]]:
    """The tensors that `save_model` writes, as views of the model's tensors; tied tensors once."""
    from transformers.core_model_loading import revert_weight_conversion

    weights: dict[str, Tensor] = {}
    seen = set[int]()
    for name, weight in model.state_dict().items():
        if weight.data_ptr() not in seen:
            weights[name] = weight
            seen.add(weight.data_ptr())
    return [*revert_weight_conversion(model, weights).items(), *tied_head(model, head)]


def tied_head(model: Any, head: nn.Linear | None) -> list[tuple[str, Tensor]]:
    """The output layer under its own name if it is tied to the embeddings."""
    if head is None or head.weight is not model.get_input_embeddings().weight:
        return []
    name = next(name for name, module in model.named_modules() if module is head)
    return [(f"{name}.weight", head.weight.detach())]
