"""A sequence-classification model that scores texts: loading, the wording of texts, scores, and its record on disk.

The score of a decoder is read at each text's last token, whose position is known. transformers' own forward pass takes
the last token that is not the padding token, which is wrong if padding and end of sequence are the same token, and
refuses batches if there is no padding token. Texts are padded here, on the right, for any padding side of the
tokenizer; under a causal mask, no earlier token sees the padding.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flatpeak.errors import UserError
from flatpeak.protocols import Tokenizer
from flatpeak.types import Message
from flatpeak.utils.adapter_base import ADAPTER_CONFIG, named_base
from flatpeak.utils.adapter_base import read_record as read_base_record
from flatpeak.utils.adapters import load_adapter, save_adapter
from flatpeak.utils.control_tokens import TextEncoder, render_chat
from flatpeak.utils.gguf import find_gguf
from flatpeak.utils.huggingface import (
    has_tokenizer,
    is_surely_local,
    load_errors,
    load_tokenizer,
    local_or_hub,
    no_progress_bar,
    no_warnings,
    save_tokenizer,
)
from flatpeak.utils.quantization import disable_repacking, loading_options

RECORD = "reward_model.json"
"""The file next to the model's files with its training template and the statistics of its scores."""
CHAT = "chat"
PLAIN = "{prompt}\n\n{completion}"
PROMPT, COMPLETION = "{prompt}", "{completion}"
UNBOUNDED = 10**9
"""Tokenizers without a limit have a `model_max_length` far above this."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """The scores of reference completions: the held-out answers of the preference pairs."""

    mean: float
    std: float
    """With n - 1 in the denominator."""
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """The contents of reward_model.json, stored with the weights of a reward model that flatpeak trained."""

    template: str
    """`chat`: the tokenizer's chat template; else a text with {prompt} and {completion} in it."""
    max_tokens: int | None = None
    """The limit of texts in training."""
    scores: Spread | None = None

    def write(self, directory: Path) -> None:
        """Write the record into the model's directory."""
        (directory / RECORD).write_text(json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def read_record(directory: Path) -> Record | None:
    """The record of a model that flatpeak trained; None if there is none. UserError if it is damaged."""
    path = directory / RECORD
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        scores = content.pop("scores")
        return Record(**content, scores=None if scores is None else Spread(**scores))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{path}: not a reward model's record ({error}); copy it again from the run") from error


def pick_template(name: str, tokenizer: Any, record: Record | None, *, where: str) -> str:
    """Resolve a recipe's template: `chat`, or a text with {prompt} and {completion}; `where` is the option's name."""
    if name == "auto":
        if record is not None:
            return record.template
        if not tokenizer.chat_template:
            raise UserError(
                f"{where}=auto: this model's tokenizer has no chat template and nothing records how it was trained to "
                f"read; set {where}=plain, or a text file with {PROMPT} and {COMPLETION} in it"
            )
        return CHAT
    if name == CHAT:
        if not tokenizer.chat_template:
            raise UserError(f"{where}=chat: this model's tokenizer has no chat template; use plain or a file")
        return CHAT
    return PLAIN if name == "plain" else _read_template(name, where=where)


def _read_template(name: str, *, where: str) -> str:
    file = Path(name).expanduser()
    if not file.is_file():
        raise UserError(f"{where}={name}: neither a file nor one of auto, chat, plain")
    try:
        text = file.read_text(encoding="utf-8").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"{where}={name}: not UTF-8 text; save the file as UTF-8") from error
    if text.count(PROMPT) != 1 or text.count(COMPLETION) != 1:
        raise UserError(f"{where}={name}: the file must have {PROMPT} once and {COMPLETION} once")
    return text


def conversation(columns: Mapping[str, Any]) -> tuple[Message, ...] | None:
    """The prompt of a preference row as chat messages; None if its column `messages` is missing or is not a prompt.

    For example, a conversation that includes its answer is not a prompt.
    """
    messages = columns.get("messages")
    if not isinstance(messages, list | tuple) or not messages:
        return None
    if not all(isinstance(one, Mapping) and isinstance(one.get("content"), str) for one in messages):
        return None
    return tuple(messages) if messages[-1].get("role") == "user" else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoded:
    """The tokens of a text for the model."""

    token_ids: tuple[int, ...]
    truncated: bool
    """Whether the beginning of the question was cut off."""


@dataclass(frozen=True, kw_only=True)
class Wording:
    """The wording of question and completion as one text, and its tokens."""

    tokenizer: Tokenizer
    template: str
    """See `Record.template`."""
    max_tokens: int | None = None

    def encode(self, prompt: str | Sequence[Message], completion: str) -> Encoded | None:
        """The tokens of a question (or of the chat messages that ask it) and a completion.

        If there are too many, keep the longest end of the question that fits, found by bisection over its start. None
        if the completion does not fit even without the question: without its beginning or end it would not be the
        answer that should be scored.
        """
        messages: list[Message] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        question = str(messages[-1]["content"])

        def worded(start: int) -> list[int]:
            return self._tokens([*messages[:-1], {**messages[-1], "content": question[start:]}], completion)

        whole = worded(0)
        if self.max_tokens is None or len(whole) <= self.max_tokens:
            return Encoded(token_ids=tuple(whole), truncated=False)
        best = worded(len(question))
        if len(best) > self.max_tokens:
            return None
        too_early, start = 0, len(question)
        while start - too_early > 1:
            middle = (too_early + start) // 2
            tokens = worded(middle)
            if len(tokens) <= self.max_tokens:
                start, best = middle, tokens
            else:
                too_early = middle
        return Encoded(token_ids=tuple(best), truncated=True)

    @cached_property
    def _encoder(self) -> TextEncoder:
        return TextEncoder(self.tokenizer)

    def _tokens(self, messages: Sequence[Message], completion: str) -> list[int]:
        if self.template == CHAT:
            conversation = self._encoder.quote_all([*messages, {"role": "assistant", "content": completion}])
            text = render_chat(self.tokenizer, conversation, add_generation_prompt=False)
            # The template has already written every special token into the text, including the beginning of sequence.
            return self._encoder.encode(text)
        # Locate both positions before inserting anything, because a question may contain {completion}.
        first, second = sorted((PROMPT, COMPLETION), key=self.template.index)
        before, _, rest = self.template.partition(first)
        between, _, after = rest.partition(second)
        quote = self._encoder.quote
        values = {PROMPT: quote(str(messages[-1]["content"])), COMPLETION: quote(completion)}
        tokens = self._encoder.encode(
            f"{before}{values[first]}{between}{values[second]}{after}", add_special_tokens=True
        )
        end = self.tokenizer.eos_token_id
        # Encoders' tokenizers add the end of a text themselves; for decoders' tokenizers it must be added.
        return tokens if end is None or tokens[-1:] == [end] else [*tokens, end]


def locate(path: str, *, where: str) -> str:
    """The directory that `from_pretrained` loads: a run's best checkpoint, else its last; a Hub name stays as it is."""
    directory = Path(path).expanduser()
    checkpoints = directory / "checkpoints"
    for candidate in (directory, checkpoints / "best", checkpoints / "last", checkpoints / "sft" / "last"):
        if any((candidate / name).is_file() for name in ("config.json", ADAPTER_CONFIG)):
            return str(candidate)
    if directory.exists() and find_gguf(path) is not None:
        return path
    if directory.is_dir():
        raise UserError(f"{where}={path}: neither a model's directory nor a run with a checkpoint")
    if is_surely_local(path):
        raise UserError(f"{where}={path}: no such directory")
    return path


def load_model(
    path: str,
    *,
    where: str,
    device: torch.device,
    trained: bool = True,
    quantization: str | None = None,
    **settings: Any,
) -> tuple[Any, Any, Record | None]:
    """(model, tokenizer, record) from the path that `locate` returned; `settings` go to the model's `from_pretrained`.

    Unless `trained` is false, weights missing in the files are a UserError: transformers would draw a missing score
    head at random. Adapters are loaded on the base that they name, as they were trained.
    """
    directory = Path(path)
    if not (directory / ADAPTER_CONFIG).is_file():
        settings |= loading_options(quantization, dtype=settings.get("dtype", torch.float32), device=device)
        model, tokenizer = _load(path, where=where, trained=trained, **settings)
        return model.to(device), tokenizer, read_record(directory)
    model, tokenizer = load_base(path, where=where, device=device, quantization=quantization, **settings)
    return load_adapter(model, path, where=where, scores=True).to(device), tokenizer, read_record(directory)


def load_base(
    path: str, *, where: str, device: torch.device, quantization: str | None = None, **settings: Any
) -> tuple[Any, Any]:
    """(base of an adapter with a new head, the adapter's tokenizer, or the base's if the adapter has none)."""
    directory = Path(path)
    base, revision = named_base(directory, where=where)
    record = read_base_record(directory)
    options = {**settings, "revision": revision, "num_labels": 1, "ignore_mismatched_sizes": True}
    quantization = record.quantization if record is not None else quantization
    options |= loading_options(quantization, dtype=settings.get("dtype", torch.float32), device=device)
    model, tokenizer = _load(base, where=f"{where}={path}: base", trained=False, **options)
    return model, load_tokenizer(path) if has_tokenizer(directory) else tokenizer


def _load(path: str, *, where: str, trained: bool, **settings: Any) -> tuple[Any, Any]:
    """(model, tokenizer) from files with all of its weights; the head may be missing if `trained` is false."""
    from transformers import AutoModelForSequenceClassification

    revision = {"revision": settings.pop("revision", None) or "main"}
    # Warnings about missing weights would repeat the error below, or name a head that is intentionally new.
    with load_errors(path, where=where, kind="a sequence-classification model"), no_progress_bar(), no_warnings():
        source = local_or_hub(path, revision=revision["revision"])
        tokenizer = load_tokenizer(source, **revision)
        model, report = AutoModelForSequenceClassification.from_pretrained(
            source, **revision, **settings, output_loading_info=True
        )
        model.name_or_path = path  # adapters name it as their base
    if trained and report["missing_keys"]:
        raise UserError(
            f"{where}={path} has no {', '.join(sorted(report['missing_keys']))}: it is not a reward model; train one "
            "from it with flatpeak reward-model"
        )
    disable_repacking(model)
    return model, tokenizer


def default_batch_tokens(*, on_cpu: bool) -> int:
    """Tokens per forward pass, including padding, if a recipe does not set them."""
    return 4096 if on_cpu else 32768


class Classifier:
    """A model with its tokenizer and its template. Always in eval mode: training also runs without dropout."""

    def __init__(self, model: Any, wording: Wording, *, label: int = 0) -> None:
        self.model = model.eval()
        self.wording = wording
        self.label = label
        inner = model.get_base_model() if hasattr(model, "get_base_model") else model
        self._adapted = inner is not model
        head = getattr(inner, "score", None)
        trunk = getattr(inner, inner.base_model_prefix, None)
        # If a head is trained whole next to adapters, peft wraps it.
        linear = isinstance(head, torch.nn.Linear) or hasattr(head, "modules_to_save")
        self._causal: tuple[Any, Any] | None = (trunk, head) if linear and trunk is not None else None
        self._pad: int | None = None
        self._pad = self._padding_token()

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        device: torch.device = next(self.model.parameters()).device
        return device

    def _padding_token(self) -> int | None:
        """The token that fills shorter texts; None if texts of different lengths cannot share a batch."""
        if self._causal is not None:
            return 0  # any token: nothing attends to it
        if getattr(self.model.config, "is_encoder_decoder", False):
            return None
        pad = getattr(self.model.config, "pad_token_id", None)
        pad = pad if isinstance(pad, int) else getattr(self.wording.tokenizer, "pad_token_id", None)
        return pad if pad is not None and self._padding_is_harmless(pad) else None

    @torch.no_grad()
    def _padding_is_harmless(self, pad: int) -> bool:
        """Whether padding leaves a text's score unchanged; not if a model reads the last position of its input."""
        vocabulary = self.model.config.get_text_config().vocab_size
        others = [token for token in range(vocabulary) if token != pad][-6:]
        alone = self.scores([others[:3]])
        padded = self.scores([others[:3], others], pad=pad)[:1]
        return bool(torch.allclose(alone, padded, rtol=1e-2, atol=1e-4))

    def scores(self, texts: Sequence[Sequence[int]], *, pad: int | None = None) -> Tensor:
        """Scores of these token sequences, float32 [N], by one forward pass; differentiable if gradients are on."""
        lengths = [len(text) for text in texts]
        if self._pad is None and pad is None and len(set(lengths)) > 1:
            return torch.cat([self.scores([text]) for text in texts])
        lengths_N = torch.tensor(lengths, device=self.device)
        width, padding = max(lengths), (self._pad if pad is None else pad) or 0
        tokens_NL = torch.tensor([[*text, *[padding] * (width - len(text))] for text in texts], device=self.device)
        mask_NL = (torch.arange(width, device=self.device) < lengths_N[:, None]).long()
        if self._causal is None:
            logits_NK: Tensor = self.model(input_ids=tokens_NL, attention_mask=mask_NL).logits
        else:
            trunk, head = self._causal
            hidden_NLD = trunk(input_ids=tokens_NL, attention_mask=mask_NL, use_cache=False).last_hidden_state
            rows_N = torch.arange(len(texts), device=self.device)
            logits_NK = head(hidden_NLD[rows_N, lengths_N - 1])
        return logits_NK[:, self.label].float()

    @torch.inference_mode()
    def score_all(self, texts: Sequence[Sequence[int]], *, batch_tokens: int | None = None) -> list[float]:
        """Scores of any number of texts, in their order, without gradients."""
        budget = batch_tokens or default_batch_tokens(on_cpu=self.device.type == "cpu")
        scores = [0.0] * len(texts)
        for batch in length_batches([len(text) for text in texts], budget=budget):
            for index, score in zip(batch, self.scores([texts[i] for i in batch]).tolist(), strict=True):
                scores[index] = score
        return scores

    def save(self, directory: Path, *, scores: Spread | None) -> None:
        """Write model, tokenizer and record."""
        with no_progress_bar():
            if self._adapted:
                save_adapter(self.model, directory)
            else:
                self.model.save_pretrained(directory)
        save_tokenizer(self.wording.tokenizer, directory)
        Record(template=self.wording.template, max_tokens=self.wording.max_tokens, scores=scores).write(directory)


def length_batches(lengths: Sequence[int], *, budget: int) -> Iterator[list[int]]:
    """Indices in batches of at most `budget` tokens, including padding, but at least one text.

    The longest come first, so that neighbours have similar lengths, and memory runs out at once or not at all.
    """
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if batch and (len(batch) + 1) * lengths[batch[0]] > budget:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def make_wording(
    model: Any, tokenizer: Any, record: Record | None, *, template: str, max_tokens: int | None, where: str
) -> Wording:
    """The wording of texts for a model; `where` names the section with its settings."""
    # A tokenizer's limit may be below the config's: two of RoBERTa's positions hold no text.
    lengths = (getattr(model.config.get_text_config(), "max_position_embeddings", None), tokenizer.model_max_length)
    context = min((length for length in lengths if length is not None and 0 < length < UNBOUNDED), default=None)
    wanted = max_tokens or (record.max_tokens if record is not None else None)
    if wanted is not None and context is not None and wanted > context:
        raise UserError(f"{where}.max_tokens={wanted} exceeds the model's context of {context}: lower it")
    return Wording(
        tokenizer=tokenizer,
        template=pick_template(template, tokenizer, record, where=f"{where}.template"),
        max_tokens=wanted or context,
    )
