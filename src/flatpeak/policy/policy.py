"""The policy: a causal language model that scores packed completions and decodes new ones, from the same weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.utils import logging as transformers_logging

from flatpeak.errors import UserError
from flatpeak.functional.logprobs import token_logprobs
from flatpeak.policy import attention
from flatpeak.policy.cache import KEY_MULTIPLE, KeyValueCache
from flatpeak.policy.dropout import silence_dropout
from flatpeak.policy.head import read_head
from flatpeak.policy.packing import PackedRow, fill, pack_batch, pack_prompts
from flatpeak.policy.padded import padded_token_logprobs
from flatpeak.policy.support import probe, unsupported
from flatpeak.protocols import Tokenizer
from flatpeak.types import Batch


class Policy:
    """A transformers model behind one interface; implements protocols.Decoder where `native` is true.

    Where the architecture is not proven with flatpeak's attention, `native` is false, `notice` says why, scoring
    pads, and rollouts need transformers' own `generate`.
    """

    def __init__(self, model: Any, tokenizer: Tokenizer, *, dropout: bool = False) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.causal = model.get_base_model() if hasattr(model, "get_base_model") else model
        self.eos_token_ids = _eos_token_ids(self.causal, tokenizer)
        self.context_length: int | None = getattr(self.causal.config, "max_position_embeddings", None)
        self.head = read_head(self.causal)
        if not dropout:
            silence_dropout(model)
        self._own_attention = self.causal.config._attn_implementation or "eager"
        self.notice = unsupported(self.causal)
        self.native = self.notice is None
        if self.native:
            attention.register()
            self.causal.set_attn_implementation(attention.NAME)
            self.notice = probe(self)
            self.native = self.notice is None
            if not self.native:
                self.release()

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.head.linear.weight.device

    @property
    def trunk(self) -> nn.Module:
        """The model below its output layer."""
        trunk: nn.Module = getattr(self.causal, self.causal.base_model_prefix)
        return trunk

    def parameters(self) -> list[nn.Parameter]:
        """The trainable ones."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def masters(self) -> dict[nn.Parameter, Tensor]:
        """The float32 value behind each trainable weight: the weight itself, as all of them are float32."""
        return {parameter: parameter for parameter in self.parameters()}

    def token_logprobs(
        self, batch: Batch, *, temperature: float, twice_differentiable: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Log-probability of, and entropy at, each response token: two float32 [T], of softmax(logits / temperature).

        Dropout, if the policy has any, is active exactly when gradients are. `twice_differentiable` goes through the
        plain model and attention written out, at the price of a [T, V] tensor: for exact curvature.
        """
        if self.model.training != torch.is_grad_enabled():
            self.model.train(torch.is_grad_enabled())
        if twice_differentiable:
            with self.plain_attention(), sdpa_kernel(SDPBackend.MATH):
                return padded_token_logprobs(self.causal, batch, temperature=temperature)
        if not self.native:
            return padded_token_logprobs(self.causal, batch, temperature=temperature)
        row = pack_batch(batch)
        hidden_TD = self.hidden(row, attention.PackedContext(row)).index_select(0, row.source_T)
        return token_logprobs(
            hidden_TD,
            self.head.linear.weight,
            batch.tokens_T,
            bias_V=self.head.linear.bias,
            softcap=self.head.softcap,
            logit_scale=self.head.logit_scale,
            temperature=temperature,
        )

    def prefill(
        self, prompts: Sequence[Sequence[int]], *, copies: int, max_new_tokens: int
    ) -> tuple[KeyValueCache, Tensor]:
        """See protocols.Decoder."""
        self._evaluate()
        row = pack_prompts(prompts, device=self.device, multiple=KEY_MULTIPLE)
        context = attention.PackedContext(row, keep_keys=True)
        hidden_PD = self.hidden(row, context).index_select(0, row.source_T)
        cache = KeyValueCache(context, copies=copies, max_new_tokens=max_new_tokens)
        return cache, self.head.logits(fill(hidden_PD))[: len(prompts)]

    def decode(self, state: KeyValueCache, tokens_R: Tensor) -> Tensor:
        """See protocols.Decoder."""
        self._evaluate()
        state.begin_token()
        hidden = self.trunk(
            input_ids=fill(tokens_R)[:, None],
            position_ids=state.positions_R[:, None],
            use_cache=False,
            attention_context=state,
        ).last_hidden_state[:, 0]
        state.end_token()
        return self.head.logits(hidden)[: len(tokens_R)]

    @contextmanager
    def plain_attention(self) -> Iterator[Any]:
        """The transformers model with its own attention, for a forward pass or `generate` outside flatpeak."""
        if self.native:
            self.causal.set_attn_implementation(self._own_attention)
        try:
            yield self.model
        finally:
            if self.native:
                self.causal.set_attn_implementation(attention.NAME)

    def release(self) -> None:
        """Give the model its own attention back for good."""
        self.causal.set_attn_implementation(self._own_attention)

    def save(self, directory: Path) -> None:
        """Write model and tokenizer in Hugging Face format."""
        with _no_progress_bar():
            self.model.save_pretrained(directory)
        self.tokenizer.save_pretrained(directory)  # type: ignore[attr-defined]

    def hidden(self, row: PackedRow, context: attention.PackedContext) -> Tensor:
        """The last hidden states of a packed row, [S, D]."""
        hidden: Tensor = self.trunk(
            input_ids=row.token_ids_S[None],
            position_ids=row.positions_S[None],
            use_cache=False,
            attention_context=context,
        ).last_hidden_state[0]
        return hidden

    def _evaluate(self) -> None:
        if self.model.training:
            self.model.eval()


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """transformers draws a bar at every save, across whatever display the run has."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def _eos_token_ids(model: Any, tokenizer: Tokenizer) -> frozenset[int]:
    """The union of what the tokenizer, the model and its generation config call the end of a sequence."""
    found: set[int] = set()
    for source in (tokenizer, model.config, getattr(model, "generation_config", None)):
        ids = getattr(source, "eos_token_id", None)
        found.update([ids] if isinstance(ids, int) else ids or [])
    if not found:
        raise UserError("neither tokenizer nor model names an end-of-sequence token: set tokenizer.eos_token")
    return frozenset(found)
