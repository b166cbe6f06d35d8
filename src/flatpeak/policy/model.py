"""The policy: a causal language model that scores packed completions and decodes new ones with the same weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from operator import call
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from flatpeak.errors import UserError
from flatpeak.kernels.native.decode import NativeCache, PackedModel
from flatpeak.policy.compatibility import probe, unsupported
from flatpeak.policy.decoding_attention import CpuDecodeAttention, Extension, GpuDecodeAttention
from flatpeak.policy.gpu_decoding import FusedDecoding, fused_decoding
from flatpeak.policy.kv_cache import GPU_KEY_MULTIPLE, KeyValueCache, fitting_buckets, graded_buckets
from flatpeak.policy.linears import make_fast, packed_weights, read_head
from flatpeak.policy.model_settings import (
    ModelSettings,
    eos_token_ids,
    make_adapted_layers_fast,
    plain_layers,
    register_holder,
    scoring,
    unregister_holder,
)
from flatpeak.policy.native_decoding import KernelChoice
from flatpeak.policy.native_training import make_native
from flatpeak.policy.outputs import PackedOutputs, PaddedOutputs, padded_outputs
from flatpeak.policy.packing import ROW_MULTIPLE, PackedRow, fill, key_multiple, pack_batch, pack_prompts
from flatpeak.policy.precision import below_float32, master_weight
from flatpeak.policy.training_attention import ATTENTION_NAME, PackedContext, last_hidden, register_attention
from flatpeak.protocols import Tokenizer
from flatpeak.types import PackedCompletions
from flatpeak.utils.adapters import dropout_modules, save_adapter
from flatpeak.utils.host_memory import HostMemory, OffloadedWeights
from flatpeak.utils.huggingface import named_weights, no_progress_bar, save_model, save_tokenizer

R = TypeVar("R")
Cache = KeyValueCache | NativeCache


class Policy:
    """A transformers model behind one interface; implements protocols.Decoder if `native` is true.

    If the architecture is not tested with flatpeak's attention, `native` is false and `notice` gives the reason; then
    scoring pads completions, and rollouts need transformers' `generate`.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Tokenizer,
        *,
        dropout: bool = False,
        adapter_dropout: bool = False,
        kernels: KernelChoice | None = None,
    ) -> None:
        """`dropout`, `adapter_dropout`: keep it active in training. `kernels`: the choice of the policy to copy."""
        self.model = model
        self.tokenizer = tokenizer
        self.causal = model.get_base_model() if hasattr(model, "get_base_model") else model
        self.eos_token_ids = eos_token_ids(self.causal, tokenizer)
        self.context_length: int | None = getattr(self.causal.config, "max_position_embeddings", None)
        self.batch_invariant = True
        """Whether decoding on a CPU pads slots and keys, so that a completion's bits do not depend on the batch."""
        self.kernels = kernels or KernelChoice()
        """Whether decoding and training passes on a CPU use native kernels."""
        self._uses_kernels = False
        self._packed: PackedModel | None = None
        self.enter: Callable[[Callable[[], Any]], Any] = call
        """Runs a pass of the model: a sharded model gathers its root's weights for the pass."""
        self.gathered: Callable[[], AbstractContextManager[Policy]] | None = None
        """Returns a context with a whole copy of a sharded model."""
        self.compute_dtype: torch.dtype | None = None
        """The type to which passes round a sharded model's trainable weights if it has float32 masters."""
        self._masters: dict[nn.Parameter, Tensor] = {}
        self._kept_cache: KeyValueCache | None = None
        self._fused: FusedDecoding | None = None
        self._offloaded: OffloadedWeights | None = None
        self.notice = unsupported(self.causal)
        self.native = self.notice is None
        register_holder(self.causal, self)
        self._before = ModelSettings(model, self.causal)
        try:
            self._before.give_back_layers()
            self.head = read_head(self.causal)
            if not dropout:
                self._before.silence_dropout(model, keep=dropout_modules(model) if adapter_dropout else frozenset())
            if self.native:
                register_attention()
                self._hold()
                self.notice = probe(self)
                self.native = self.notice is None
                if not self.native:
                    self._before.give_back_layers()
        except BaseException:
            self.release()
            raise

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.head.linear.weight.device

    @property
    def trunk(self) -> nn.Module:
        """The model below its output layer."""
        trunk: nn.Module = getattr(self.causal, self.causal.base_model_prefix)
        return trunk

    def parameters(self) -> list[nn.Parameter]:
        """The trainable parameters of the model."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def masters(self) -> dict[nn.Parameter, Tensor]:
        """The precise value of each trainable weight: a float32 copy of a bfloat16 weight, else the weight.

        The copies are made once. Afterwards they belong to the optimizer of the policy, which keeps the weights equal
        to the rounded copies.
        """
        for parameter in self.parameters():
            if parameter not in self._masters:
                self._masters[parameter] = master_weight(parameter)
        return {parameter: self._masters[parameter] for parameter in self.parameters()}

    def forget_weights(self) -> None:
        """Drop all references to weights that other tensors replace, so that their memory is freed."""
        self._masters.clear()
        self.kernels.release()
        self._before.forget_weights()

    def token_logprobs(
        self, batch: PackedCompletions, *, temperature: float, twice_differentiable: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Log-probability of, and entropy at, each response token: two float32 [T], of softmax(logits / temperature).

        Dropout, if the policy has any, is active exactly when gradients are. For exact curvature,
        `twice_differentiable` uses the plain model with explicit attention, at the cost of a [T, V] tensor.
        """
        settings: dict[str, Any] = {"temperature": temperature, "twice_differentiable": twice_differentiable}
        return self.read(batch, lambda outputs: outputs.logprobs(), **settings)

    def read(
        self,
        batch: PackedCompletions,
        function: Callable[[PackedOutputs | PaddedOutputs], R],
        *,
        temperature: float,
        twice_differentiable: bool = False,
    ) -> R:
        """The value of a function of the outputs at response tokens; settings as of `token_logprobs`."""
        if torch.is_grad_enabled():
            self.kernels.release()
        if self.model.training != torch.is_grad_enabled():
            self.model.train(torch.is_grad_enabled())
        result: R = self.enter(
            lambda: function(self._outputs(batch, temperature, twice_differentiable=twice_differentiable))
        )
        return result

    def _outputs(
        self, batch: PackedCompletions, temperature: float, *, twice_differentiable: bool
    ) -> PackedOutputs | PaddedOutputs:
        if twice_differentiable:
            with self.plain_attention(), plain_layers(self.causal), sdpa_kernel(SDPBackend.MATH):
                return padded_outputs(self.causal, batch, temperature=temperature)
        if not self.native:
            return padded_outputs(self.causal, batch, temperature=temperature)
        self.use_kernels(self.kernels.trains(self))
        return self._packed_outputs(batch, temperature)

    def use_kernels(self, native: bool) -> None:
        """Use native kernels for packed passes if `native`, else torch."""
        if native != self._uses_kernels:
            self._uses_kernels = native
            with self.plain_attention():  # on exit, the layers follow the new choice
                pass

    def packed_logprobs(self, batch: PackedCompletions, *, temperature: float) -> tuple[Tensor, Tensor]:
        """`token_logprobs` by one packed pass of the model in its current mode."""
        return self._packed_outputs(batch, temperature).logprobs()

    def _packed_outputs(self, batch: PackedCompletions, temperature: float) -> PackedOutputs:
        row = pack_batch(batch)
        hidden_TD = self.hidden(row, PackedContext(row, native=self._uses_kernels)).index_select(0, row.source_T)
        return PackedOutputs(hidden_TD=hidden_TD, head=self.head, batch=batch, temperature=temperature)

    @property
    def below_float32(self) -> bool:
        """Whether any computation in the model rounds more coarsely than float32."""
        return self.compute_dtype is not None or below_float32(self.model)

    def scoring(self) -> AbstractContextManager[None]:
        """A context in which `token_logprobs` has the same bits as in training, without gradients."""
        return scoring(self.model)

    def offload(self) -> None:
        """Keep the weights of a model that only scores in host memory, if its device has its own memory.

        `on_device` moves them to the device for scoring; buffers always stay there.
        """
        host = HostMemory.beside(self.device)
        if host is not None:
            self._offloaded = OffloadedWeights(self._own_weights(), host)

    @property
    def offloaded(self) -> bool:
        """Whether the weights are in host memory."""
        return self._offloaded is not None

    def on_device(self) -> AbstractContextManager[None]:
        """A context in which the weights are on the device; may be nested."""
        return nullcontext() if self._offloaded is None else self._offloaded.on_device()

    def attach_sharding(
        self,
        enter: Callable[[Callable[[], Any]], Any],
        gathered: Callable[[], AbstractContextManager[Policy]],
        compute_dtype: torch.dtype | None,
    ) -> None:
        """Use `enter` for passes, the copy of `gathered` to decode and save; passes round to `compute_dtype`."""
        self.enter, self.gathered, self.compute_dtype = enter, gathered, compute_dtype

    def _own_weights(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    @contextmanager
    def decoding(self) -> Iterator[None]:
        """A context for decoding; see protocols.Decoder. UserError if the native engine does not support the model."""
        if not self.native:
            raise UserError(
                f"flatpeak does not decode this model natively ({self.notice}): sample with "
                "flatpeak.pipeline.rollout_engines.PlainSampler(policy, max_rows=64)"
            )
        self._evaluate()  # adapters with active dropout cannot be packed
        self._packed = self.kernels.pack(self)
        if self._packed is None:
            self.use_kernels(False)  # otherwise a rollout's bits would depend on earlier training passes
        try:
            with nullcontext() if self._packed is not None else packed_weights(self.causal):
                yield
        finally:
            self._packed = None

    @property
    def decoded_with(self) -> str | None:
        """The decoder of rollouts: torch or a library of kernels; None if `generate` or servers sample."""
        return self.kernels.name(self) if self.native and not self.kernels.idle else None

    @property
    def computed_with(self) -> str | None:
        """The decoder and the training kernels, once if they are equal; None without the native engine."""
        return self.kernels.names(self) if self.native else None

    @property
    def decoding_tensors(self) -> list[Tensor]:
        """Weights and buffers whose addresses a captured step uses."""
        return [*self.model.parameters(), *self.model.buffers(), *(self._fused.tensors if self._fused else ())]

    def batch_sizes(self, slots: int) -> list[int]:
        """The numbers of slots that a step may decode; few on a GPU, because each needs its own graph."""
        if self.device.type == "cpu":
            step = ROW_MULTIPLE if self.batch_invariant else 1
            return list(range(step, slots + step, step))
        sizes = [1, 2, 4, 8, *range(16, slots + 16, 16)]
        return sizes[: 1 + next(index for index, size in enumerate(sizes) if size >= slots)]

    def open(self, *, slots: int, entries: int, prompt_lengths: Sequence[int], new_tokens: int) -> Cache:
        """Memory for a request; see protocols.Decoder. On a GPU it is kept and only grows: graphs refer to it."""
        if self._packed is not None:
            longest = max(prompt_lengths)
            return NativeCache(self._packed, slots=slots, longest_prompt=longest, new_tokens=new_tokens)
        new_cache = partial(KeyValueCache, slots=slots, entries=entries, new_tokens=new_tokens, device=self.device)
        if self.device.type == "cpu":
            multiple = key_multiple(self.causal.config) if self.batch_invariant else 1
            buckets = fitting_buckets(prompt_lengths, entries, multiple=multiple)
            return new_cache(buckets=buckets, key_multiple=multiple, attention=CpuDecodeAttention())
        self._fused = fused_decoding(self.causal, self._fused)
        buckets = graded_buckets(prompt_lengths, entries)
        cache = self._kept_cache
        if cache is None or not cache.serves(slots=slots, entries=entries, buckets=buckets, new_tokens=new_tokens):
            # Keep all earlier regions: otherwise alternating requests would allocate memory every time.
            for columns, count in cache.prompts.buckets.items() if cache is not None else ():
                buckets[columns] = max(count, buckets.get(columns, 0))
            self._kept_cache = cache = None  # free it before allocating the next
            cache = new_cache(buckets=buckets, key_multiple=GPU_KEY_MULTIPLE, attention=GpuDecodeAttention())
            self._kept_cache = cache
        cache.restart(new_tokens=new_tokens)
        return cache

    def prefill(self, state: Cache, prompts: Sequence[Sequence[int]], entries: Sequence[int]) -> Tensor:
        """Read prompts into these entries of the cache; see protocols.Decoder."""
        if isinstance(state, NativeCache):
            return state.prefill(prompts, entries)
        self._evaluate()
        row = pack_prompts(prompts, device=self.device, multiple=state.key_multiple)
        context = PackedContext(row, keep_prompts=True)
        hidden_PD = self.hidden(row, context).index_select(0, row.source_T)
        state.store(entries, context)
        return self.head.logits(fill(hidden_PD))[: len(prompts)]

    def extend(
        self, state: Cache, slots: Sequence[int], kept: Sequence[int], tokens: Sequence[Sequence[int]]
    ) -> Tensor:
        """Append several tokens to completions; see protocols.Decoder."""
        if isinstance(state, NativeCache):
            return state.extend(slots, kept, tokens)
        self._evaluate()
        hidden_KD = Extension(state, slots, kept, tokens).hidden(self.trunk)
        return self.head.logits(fill(hidden_KD))[: len(slots)]

    def decode(self, state: Cache, tokens_R: Tensor) -> Tensor:
        """Append a token to each of the first R slots; see protocols.Decoder."""
        if isinstance(state, NativeCache):
            return state.decode(tokens_R)
        self._evaluate()
        state.begin_token(len(tokens_R))
        if self._fused is not None:
            hidden = self._fused.hidden(state, tokens_R)
        else:
            positions = state.positions_S[: len(tokens_R)]
            hidden = last_hidden(self.trunk, tokens_R[:, None], positions[:, None], state)[:, 0]
        state.end_token(len(tokens_R))
        return self.head.logits(hidden)

    @contextmanager
    def plain_attention(self) -> Iterator[Any]:
        """The transformers model with its own attention, for a forward pass or `generate` outside flatpeak."""
        if self.native:
            self._before.give_back_layers()
        try:
            yield self.model
        finally:
            if self.native:
                self._hold()

    def release(self) -> None:
        """Restore the model's settings; its weights keep their current values."""
        self._before.restore()
        unregister_holder(self.causal, self)

    @property
    def adapted(self) -> bool:
        """Whether the model is a peft model, with adapters on its base."""
        return self.causal is not self.model

    @property
    def vocabulary_size(self) -> int:
        """The number of tokens in the output layer's logits."""
        return self.head.linear.weight.shape[0]

    def saved_weights(self) -> list[nn.Parameter]:
        """The weights that `save_weights` writes: all, or the adapters. Call it inside `whole` if sharded."""
        with self.whole() as whole:
            pairs = zip(self.model.parameters(), whole.model.parameters(), strict=True)
            return [weight for own, weight in pairs if own.requires_grad or not self.adapted]

    def whole(self) -> AbstractContextManager[Policy]:
        """A context with a policy that can decode and be saved; if it is sharded, all ranks must enter."""
        return nullcontext(self) if self.gathered is None else self.gathered()

    def save(self, directory: Path) -> None:
        """Write model and tokenizer in Hugging Face format; if there are adapters, only these in peft's format."""
        self.save_weights(directory)
        save_tokenizer(self.tokenizer, directory)

    def save_weights(self, directory: Path, *, head: bool = False) -> None:
        """Write the model without the tokenizer; `head`: also write a tied output layer separately."""
        with no_progress_bar(), self.whole() as whole:
            if self.adapted:
                save_adapter(whole.model, directory)
            else:
                save_model(whole.model, directory, head=whole.head.linear if head else None)

    def named_weights(self, *, head: bool = False) -> list[tuple[str, Tensor]]:
        """The tensors that `save_weights` writes, by name, not copied. Call it inside `whole` if sharded."""
        with self.whole() as whole:
            return named_weights(whole.model, head=whole.head.linear if head else None)

    def hidden(self, row: PackedRow, context: PackedContext) -> Tensor:
        """The last hidden states of a packed row, [S, D]."""
        return last_hidden(self.trunk, row.token_ids_S[None], row.positions_S[None], context)[0]

    def _hold(self) -> None:
        self.causal.set_attn_implementation(ATTENTION_NAME)
        make_fast(self.causal)
        make_adapted_layers_fast(self.causal)
        if self._uses_kernels:
            make_native(self.causal)

    def _evaluate(self) -> None:
        if self.model.training:
            self.model.eval()
