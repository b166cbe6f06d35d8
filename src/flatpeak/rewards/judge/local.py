"""A local transformers model as a judge, decoded greedily in batches on the machine that trains."""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flatpeak.errors import UserError
from flatpeak.rewards.judge.protocol import JudgeReply, JudgeRequest
from flatpeak.utils.control_tokens import TextEncoder, render_chat
from flatpeak.utils.huggingface import hub_or_directory, local_or_hub


class LocalJudge:
    """A chat model as a judge, decoded greedily, all requests of a call together; it asks for `batch_size` at a time.

    A prompt that leaves no room for the reply in the model's context has no reply; nothing is truncated silently. The
    rounding of sums depends on the shape of a batch, so in rare cases a reply may depend on the others in its batch.
    """

    def __init__(
        self,
        path: str,
        *,
        dtype: str = "auto",
        device: str | None = None,
        batch_size: int = 8,
        revision: str | None = None,
    ) -> None:
        """UserError if there is no such model, or it has no chat template."""
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        with hub_or_directory(path) as problem:
            try:
                source = local_or_hub(path, revision=revision)
                self._tokenizer: Any = AutoTokenizer.from_pretrained(source, revision=revision)
                model: Any = AutoModelForCausalLM.from_pretrained(source, revision=revision, dtype=dtype)
            except (OSError, ValueError, KeyError) as error:
                text = problem or " ".join(str(error).split())[:200]
                raise UserError(f"backend.path={path}: {text}: name a model directory or Hub model") from error
        if not self._tokenizer.chat_template:
            raise UserError(f"backend.path={path}: its tokenizer has no chat template: use an instruction-tuned model")
        self._encoder = TextEncoder(self._tokenizer)
        self._device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self._model = model.to(self._device).eval().requires_grad_(False)
        self._lock = asyncio.Lock()
        self.batch_size = batch_size
        self.identity = f"{path} ({_fingerprint(source, revision)}, {self._model.dtype})"

    @property
    def reserved_tokens(self) -> tuple[str, ...]:
        """The control tokens of the tokenizer."""
        return tuple(sorted(self._encoder.control_tokens))

    async def ask(self, requests: Sequence[JudgeRequest]) -> list[JudgeReply]:
        """Replies to a batch of requests, in a thread so that other judges go on."""
        async with self._lock:
            return await asyncio.to_thread(self._generate, list(requests))

    async def close(self) -> None:
        """Release the model's weights."""
        self._model = None

    def _generate(self, requests: list[JudgeRequest]) -> list[JudgeReply]:
        started = time.perf_counter()
        encoded = [(request, self._encode(request)) for request in requests]
        context = getattr(self._model.config, "max_position_embeddings", None) or math.inf
        fitting = [(request, prompt) for request, prompt in encoded if len(prompt) + request.max_tokens <= context]
        generated = iter(self._decode(fitting) if fitting else [])
        replies = []
        for request, prompt in encoded:
            if len(prompt) + request.max_tokens <= context:
                replies.append(self._reply(next(generated), request, len(prompt), started))
            else:
                needed = f"prompt of {len(prompt)} tokens and a reply of {request.max_tokens}"
                reason = f"{needed} exceed the context of {context}"
                replies.append(JudgeReply(text=None, reason=reason, attempts=0))
        return replies

    def _encode(self, request: JudgeRequest) -> list[int]:
        messages = [{**message, "content": self._encoder.quote(message["content"])} for message in request.messages]
        text = render_chat(self._tokenizer, messages, add_generation_prompt=True)
        # The template writes the beginning-of-sequence token itself where the model wants one.
        return self._encoder.encode(text)

    def _decode(self, encoded: Sequence[tuple[JudgeRequest, list[int]]]) -> list[list[int]]:
        import torch

        longest, pad = max(len(prompt) for _, prompt in encoded), self._pad_token_id
        ids = torch.tensor([[pad] * (longest - len(p)) + p for _, p in encoded], device=self._device)
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for _, p in encoded], device=self._device)
        with torch.inference_mode():
            out = self._model.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=max(request.max_tokens for request, _ in encoded),
                do_sample=False,
                temperature=None,
                top_p=None,
                top_k=None,
                pad_token_id=pad,
            )
        return [list(row) for row in out[:, longest:].tolist()]

    @property
    def _pad_token_id(self) -> int:
        pad = self._tokenizer.pad_token_id
        return int(pad) if pad is not None else min(self._end_token_ids, default=0)

    @property
    def _end_token_ids(self) -> set[int]:
        configured = self._model.generation_config.eos_token_id
        listed = configured if isinstance(configured, list) else [configured]
        return {int(token) for token in (*listed, self._tokenizer.eos_token_id) if token is not None}

    def _reply(self, tokens: list[int], request: JudgeRequest, prompt_tokens: int, started: float) -> JudgeReply:
        end = next((index for index, token in enumerate(tokens) if token in self._end_token_ids), None)
        reply_tokens = tokens[: request.max_tokens] if end is None else tokens[: min(end, request.max_tokens)]
        return JudgeReply(
            text=self._tokenizer.decode(reply_tokens, skip_special_tokens=True),
            cut=end is None or end >= request.max_tokens,
            prompt_tokens=prompt_tokens,
            completion_tokens=len(reply_tokens),
            latency=time.perf_counter() - started,
        )


def _fingerprint(path: str, revision: str | None) -> str:
    """A hash of a directory's file names, sizes and times, so that other weights do not share cached replies."""
    directory = Path(path)
    if not directory.is_dir():
        return revision or "main"
    files = sorted(file for file in directory.iterdir() if file.is_file())
    listed = "\n".join(f"{file.name} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in files)
    return hashlib.sha256(listed.encode()).hexdigest()[:12]
