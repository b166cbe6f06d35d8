"""A local transformers model as a judge: batched, greedy, on the machine that trains."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from flatpeak.errors import UserError
from flatpeak.rewards.judge.protocol import JudgeReply, JudgeRequest
from flatpeak.utils.huggingface import hub_or_directory


class LocalJudge:
    """Replies of a chat model, decoded greedily in batches of `batch_size`, the longest prompts first.

    A prompt that leaves no room for the reply in the model's context has no reply; nothing is cut off silently. Sums in
    a batch are rounded by its shape, so a reply may differ in rare cases with what it is batched with.
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
                self._tokenizer: Any = AutoTokenizer.from_pretrained(path, revision=revision)
                model: Any = AutoModelForCausalLM.from_pretrained(path, revision=revision, dtype=dtype)
            except (OSError, ValueError, KeyError) as error:
                text = problem or " ".join(str(error).split())[:200]
                raise UserError(f"backend.path={path}: {text}: name a model directory or Hub model") from error
        if not self._tokenizer.chat_template:
            raise UserError(f"backend.path={path}: its tokenizer has no chat template: use an instruction-tuned model")
        self._device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self._model = model.to(self._device).eval().requires_grad_(False)
        self._turn = asyncio.Lock()
        self.batch_size = batch_size
        self.identity = f"{path} ({_fingerprint(path, revision)}, {self._model.dtype})"

    @cached_property
    def reserved_tokens(self) -> tuple[str, ...]:
        """The tokenizer's control tokens."""
        added = getattr(self._tokenizer, "added_tokens_decoder", {})
        return tuple({*self._tokenizer.all_special_tokens, *(str(t.content) for t in added.values() if t.special)})

    async def ask(self, requests: Sequence[JudgeRequest]) -> list[JudgeReply]:
        """One batch at a time, in a thread, so that other judges go on."""
        async with self._turn:
            return await asyncio.to_thread(self._generate, list(requests))

    async def close(self) -> None:
        """Forget the weights."""
        self._model = None

    def _generate(self, requests: list[JudgeRequest]) -> list[JudgeReply]:
        started = time.perf_counter()
        prompts = [self._encode(request) for request in requests]
        replies: dict[int, JudgeReply] = {}
        room = getattr(self._model.config, "max_position_embeddings", None)
        ready: list[int] = []
        for index, (prompt, request) in enumerate(zip(prompts, requests, strict=True)):
            if room is not None and len(prompt) + request.max_tokens > room:
                reason = (
                    f"prompt of {len(prompt)} tokens and a reply of {request.max_tokens} exceed the context of {room}"
                )
                replies[index] = JudgeReply(text=None, reason=reason, attempts=0)
            else:
                ready.append(index)
        ready.sort(key=lambda index: len(prompts[index]), reverse=True)
        for start in range(0, len(ready), self.batch_size):
            chosen = ready[start : start + self.batch_size]
            generated = self._decode([prompts[i] for i in chosen], max(requests[i].max_tokens for i in chosen))
            for index, tokens in zip(chosen, generated, strict=True):
                replies[index] = self._reply(tokens, requests[index], len(prompts[index]), started)
        return [replies[index] for index in range(len(requests))]

    def _encode(self, request: JudgeRequest) -> list[int]:
        messages = [dict(message) for message in request.messages]
        text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        # The template writes the beginning-of-sequence token itself where the model wants one.
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _decode(self, prompts: list[list[int]], max_new_tokens: int) -> list[list[int]]:
        import torch

        longest, pad = max(map(len, prompts)), self._pad
        ids = torch.tensor([[pad] * (longest - len(p)) + p for p in prompts], device=self._device)
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=self._device)
        with torch.inference_mode():
            out = self._model.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=max_new_tokens,
                do_sample=False,
                temperature=None,
                top_p=None,
                top_k=None,
                pad_token_id=pad,
            )
        return [list(row) for row in out[:, longest:].tolist()]

    @property
    def _pad(self) -> int:
        pad = self._tokenizer.pad_token_id
        return int(pad) if pad is not None else min(self._ends, default=0)

    @property
    def _ends(self) -> set[int]:
        configured = self._model.generation_config.eos_token_id
        listed = configured if isinstance(configured, list) else [configured]
        return {int(token) for token in (*listed, self._tokenizer.eos_token_id) if token is not None}

    def _reply(self, tokens: list[int], request: JudgeRequest, prompt_tokens: int, started: float) -> JudgeReply:
        end = next((place for place, token in enumerate(tokens) if token in self._ends), None)
        kept = tokens[: request.max_tokens] if end is None else tokens[: min(end, request.max_tokens)]
        return JudgeReply(
            text=self._tokenizer.decode(kept, skip_special_tokens=True),
            cut=end is None or end >= request.max_tokens,
            prompt_tokens=prompt_tokens,
            completion_tokens=len(kept),
            latency=time.perf_counter() - started,
        )


def _fingerprint(path: str, revision: str | None) -> str:
    """Of a directory: names, sizes and times of its files, so that other weights do not get its cached replies."""
    directory = Path(path)
    if not directory.is_dir():
        return revision or "main"
    files = sorted(file for file in directory.iterdir() if file.is_file())
    listed = "\n".join(f"{file.name} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in files)
    return hashlib.sha256(listed.encode()).hexdigest()[:12]
