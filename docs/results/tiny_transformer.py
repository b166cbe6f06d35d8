"""The tiny transformer that gradient_regularization.py measures on, and rollouts of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache

import torch
from peft import LoraConfig, get_peft_model
from published_gradient_regularization import gaussian
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from flatpeak.functional import group_advantages, hessian_vector_product, importance_ratio
from flatpeak.policy.model import Policy
from flatpeak.types import Batch

PROMPTS, GROUP, PROMPT_TOKENS, RESPONSE_TOKENS = 4, 4, 4, 8
LETTERS = "abcdefghijklmnopqrstu"
VOCABULARY = len(LETTERS) + 3
Vectors = tuple[Tensor, Tensor]


class Dropout(nn.Dropout):
    """As torch's, from uniform random numbers: torch draws other masks where it is built without MKL."""

    def forward(self, values: Tensor) -> Tensor:
        """values / (1 - p) or 0."""
        return values * (torch.rand_like(values) >= self.p) / (1 - self.p) if self.training else values


def transformer(dtype: torch.dtype = torch.float64, *, dropout: float = 0.0) -> GPT2LMHeadModel:
    """A random GPT-2 of 27 thousand parameters, each of which bf16 can hold."""
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=PROMPT_TOKENS + RESPONSE_TOKENS,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=0.0,
        attn_implementation="eager",
        bos_token_id=None,
        eos_token_id=1,
    )
    model = GPT2LMHeadModel(config)
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            if parameter.ndim > 1:  # numbers of our own: how transformers initializes changes with its version
                values = gaussian(parameter.numel(), seed=index, spread=0.2).view_as(parameter)
                parameter.copy_(values.to(torch.bfloat16))
    for module in model.modules():
        for name, part in module.named_children():
            if isinstance(part, nn.Dropout) and part.p > 0:
                setattr(module, name, Dropout(part.p))
    return model.to(dtype)


def adapted(dtype: torch.dtype) -> nn.Module:
    """The transformer's weights in a type, and float32 adapters (LoRA) that have moved from where they begin."""
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True)
    model: nn.Module = get_peft_model(transformer(dtype), lora)
    for index, parameter in enumerate(p for p in model.parameters() if p.requires_grad):
        parameter.data = gaussian(parameter.numel(), seed=100 + index, spread=0.1).view_as(parameter).float()
    return model


@cache
def rollouts() -> Vectors:
    """(tokens_NL, advantages_N) of completions drawn from the transformer; letters early in the alphabet pay."""
    model = transformer()
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(1)
        tokens_NL = torch.randint(0, VOCABULARY, (PROMPTS, PROMPT_TOKENS)).repeat_interleave(GROUP, 0)
        for _ in range(RESPONSE_TOKENS):
            chances = model(input_ids=tokens_NL).logits[:, -1].softmax(-1)
            drawn = torch.searchsorted(chances.cumsum(-1), torch.rand(len(chances), 1, dtype=chances.dtype))
            tokens_NL = torch.cat([tokens_NL, drawn.clamp(max=VOCABULARY - 1)], 1)
    rewards_N = (tokens_NL[:, PROMPT_TOKENS:] < VOCABULARY // 2).double().mean(1)
    return tokens_NL, group_advantages(rewards_N.view(PROMPTS, GROUP), scale="none").view(-1)


def response_logprobs(model: nn.Module) -> Tensor:
    """Log-probabilities of the completions' tokens, [N, R], in at least float32."""
    tokens_NL = rollouts()[0]
    logits = model(input_ids=tokens_NL).logits[:, PROMPT_TOKENS - 1 : -1]
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return torch.log_softmax(logits, -1).gather(-1, tokens_NL[:, PROMPT_TOKENS:, None])[..., 0]


def surrogate(model: nn.Module, *, scale: float = 1.0) -> Callable[[], Tensor]:
    """The on-policy GRPO loss as a function of the weights: -A r, the ratio's denominator fixed here and now."""
    old = response_logprobs(model).detach()
    advantages_N1 = scale * rollouts()[1].to(old.dtype)[:, None]
    return lambda: -(advantages_N1 * importance_ratio(response_logprobs(model), old)).mean()


def imitation(model: nn.Module, *, scale: float = 1.0) -> Callable[[], Tensor]:
    """-log p of the same completions: SFT's loss."""
    return lambda: -scale * response_logprobs(model).mean()


def flat(tensors: Iterable[Tensor]) -> Tensor:
    """One float64 vector of all of them."""
    return torch.cat([tensor.detach().double().reshape(-1) for tensor in tensors])


def gradient(model: nn.Module) -> Tensor:
    """What `.grad` holds."""
    return flat([torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()])


def curvature(model: nn.Module, loss: Callable[[], Tensor], inside: set[nn.Parameter] | None = None) -> Tensor:
    """H g, exact; with `inside`, of that part of g."""
    parameters = list(model.parameters())
    found = torch.autograd.grad(loss(), parameters)
    direction = [
        g if inside is None or p in inside else torch.zeros_like(g) for p, g in zip(parameters, found, strict=True)
    ]
    return flat(hessian_vector_product(loss, parameters, direction))


def cosine(left: Tensor, right: Tensor) -> float:
    """Of the angle between two vectors."""
    return float(left @ right / (left.norm() * right.norm()))


def share(found: Tensor, truth: Tensor) -> float:
    """How many times `truth` is in `found`, by projection."""
    return float(found @ truth / (truth @ truth))


def later_batch(policy: Policy) -> Batch:
    """The rollouts as a later update of the same step meets them: the sampler's weights were others."""
    tokens_NL, advantages_N = rollouts()
    count = PROMPTS * GROUP
    batch = Batch(
        prompts=tuple(tuple(row[:PROMPT_TOKENS]) for row in tokens_NL[::GROUP].tolist()),
        prompt_N=torch.arange(PROMPTS).repeat_interleave(GROUP),
        lengths_N=torch.full((count,), RESPONSE_TOKENS),
        tokens_T=tokens_NL[:, PROMPT_TOKENS:].reshape(-1),
        sequence_T=torch.arange(count).repeat_interleave(RESPONSE_TOKENS),
        advantages_T=advantages_N.repeat_interleave(RESPONSE_TOKENS),
        weights_N=torch.full((count,), 1 / (count * RESPONSE_TOKENS), dtype=torch.float64),
        old_logprobs_T=torch.zeros(count * RESPONSE_TOKENS, dtype=torch.float64),
    )
    with torch.no_grad():
        now = [p.clone() for p in policy.parameters()]
        for index, parameter in enumerate(policy.parameters()):
            parameter.add_(gaussian(parameter.numel(), seed=100 + index, spread=0.02).view_as(parameter))
        old_T, _ = policy.token_logprobs(batch, temperature=1.0)
        for parameter, value in zip(policy.parameters(), now, strict=True):
            parameter.copy_(value)
    return replace(batch, old_logprobs_T=old_T)
