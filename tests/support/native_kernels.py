"""Random shapes that the native kernels serve, the same by plain torch, and a machine that has no kernels."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flatpeak.kernels.native import build
from flatpeak.kernels.native.decode import NativeCache, PackedModel
from flatpeak.kernels.native.training_pass import Groups
from flatpeak.policy.model import Policy
from flatpeak.policy.native_weights import SERVED, read_weights
from support.engines import Tokens, plain_logits
from support.models import tiny_model

POSITIONS = 160


@contextmanager
def no_compiler(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine with no C++ compiler and no compiled kernels but those in `home/prebuilt`, until the block ends."""
    for name in ("PATH", "CXX", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, "" if name == "CXX" else str(home))
    monkeypatch.setattr(build, "PREBUILT", home / "prebuilt")
    home.chmod(0o700)
    build._find.cache_clear()
    yield
    build._find.cache_clear()


def random_policy(rng: random.Random) -> Policy:
    """A policy of a served type with heads of 4 to 128 dimensions, and sizes that are no multiples of anything."""
    architecture = rng.choice(SERVED)
    kv_heads = rng.choice((1, 1, 2, 3))
    heads = kv_heads * rng.choice((1, 2, 3, 5, 8))
    dim = rng.choice((4, 16, 18, 32, 48, 64, 96, 128))
    hidden = heads * (dim if architecture == "gpt2" else rng.choice((2, 7, 16)))
    settings: dict[str, Any] = {
        "vocab_size": rng.choice((23, 64, 97, 300)),
        "hidden_size": hidden,
        "intermediate_size": rng.choice((17, 48, 130)),
        "num_hidden_layers": rng.choice((1, 2)),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": POSITIONS,
        "tie_word_embeddings": rng.random() < 0.5,
    }
    if architecture != "gpt2":
        settings["head_dim"] = dim
    if architecture == "mistral":
        settings["sliding_window"] = None
    if architecture in ("llama", "qwen3"):
        settings["attention_bias"] = rng.random() < 0.5
    if architecture == "llama":
        settings["mlp_bias"] = rng.random() < 0.5
    model = tiny_model(architecture, seed=rng.randrange(1000), scale=2.0, **settings).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):  # zero in a fresh model
            torch.nn.init.normal_(parameter, std=0.1)
    return Policy(model, Tokens())  # type: ignore[arg-type]


def random_prompts(rng: random.Random, vocabulary: int, lengths: Sequence[int]) -> list[list[int]]:
    return [[rng.randrange(vocabulary) for _ in range(length)] for length in lengths]


@torch.inference_mode()
def compare_random_shapes(count: int, *, seed: int) -> float:
    """Decode random rows of `count` random models; the largest error of a logit, relative to the largest logit.

    Slots come and go, move, and stand empty.
    """
    rng, worst = random.Random(seed), 0.0
    for _ in range(count):
        policy = random_policy(rng)
        vocabulary = policy.head.linear.weight.shape[0]
        lengths = [rng.choice((1, 2, 15, 16, 17, 33, 100, 130)) for _ in range(rng.choice((1, 2, 4)))]
        prompts = random_prompts(rng, vocabulary, lengths)
        slots = rng.choice((3, 5, 9))
        cache = NativeCache(PackedModel(read_weights(policy)), slots=slots, longest_prompt=130, new_tokens=30)
        texts: dict[int, list[int]] = {}
        logits = cache.prefill(prompts, range(len(prompts)))
        worst = max(worst, *(_error(policy, prompts[p], logits[p]) for p in range(len(prompts))))
        for step in range(24):
            if step in (0, 8, 17):
                _admit(rng, cache, prompts, texts, slots)
            if step == 12 and len(texts) > 1:
                _move(cache, texts, slots)
            tokens_R = torch.tensor(random_prompts(rng, vocabulary, [slots])[0])
            logits = cache.decode(tokens_R)
            for slot in texts:
                texts[slot].append(int(tokens_R[slot]))
        worst = max(worst, *(_error(policy, text, logits[slot]) for slot, text in texts.items()))
        policy.release()
    return worst


def _admit(
    rng: random.Random, cache: NativeCache, prompts: list[list[int]], texts: dict[int, list[int]], slots: int
) -> None:
    chosen = rng.sample(range(slots), rng.randint(1, slots))
    of_slot = [rng.randrange(len(prompts)) for _ in chosen]
    cache.admit(chosen, of_slot)
    texts.update({slot: list(prompts[p]) for slot, p in zip(chosen, of_slot, strict=True)})


def _move(cache: NativeCache, texts: dict[int, list[int]], slots: int) -> None:
    """Let the completion of one slot go on in another, whose own is given up."""
    source, target = max(texts), min(texts)
    cache.compact(([source], [target]), ([], []), [])
    texts[target] = texts.pop(source)


def _error(policy: Policy, text: Sequence[int], logits_V: Tensor) -> float:
    plain_V = plain_logits(policy, text)[-1]
    return float((logits_V - plain_V).abs().max() / plain_V.abs().max().clamp(min=1))


def random_groups(rng: random.Random, *, count: int = 3) -> Groups:
    """Prompts with responses of uneven lengths, one with none and one with a single token, in any order in the row."""
    lengths = []
    for group in range(count):
        responses = [rng.choice((1, 2, 7, 16, 31, 48, 49, 97, 150)) for _ in range(rng.choice((1, 3, 8)))]
        lengths.append([rng.choice((1, 2, 15, 16, 17, 33, 70, 130)), *(responses if group else [])])
    order = [(g, n) for g, group in enumerate(lengths) for n in range(len(group))]
    rng.shuffle(order)
    starts, at = {}, 0
    for g, n in order:
        starts[g, n] = at
        at += lengths[g][n]
    segments = [(starts[g, n], length) for g, group in enumerate(lengths) for n, length in enumerate(group)]
    bounds = [0, *torch.tensor([len(group) for group in lengths]).cumsum(0).tolist()]
    return Groups(bounds=torch.tensor(bounds), segments=torch.tensor(segments))


def attend_plainly(states: Sequence[Tensor], groups: Groups, scale: float) -> Tensor:
    """The definition of attention in groups, segment by segment."""
    query, key, value = states
    repeats, rows, pieces = query.shape[1] // key.shape[1], [], []
    for first, end in pairwise(groups.bounds.tolist()):
        prompt = _rows(groups, first)
        for segment in range(first, end):
            own = _rows(groups, segment)
            seen = own if segment == first else torch.cat([prompt, own])
            scores = torch.einsum("qhd,khd->hqk", query[own], key[seen].repeat_interleave(repeats, 1)) * scale
            before = len(seen) - len(own)
            visible = torch.arange(len(seen)) <= torch.arange(len(own))[:, None] + before
            weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
            pieces.append(torch.einsum("hqk,khd->qhd", weights, value[seen].repeat_interleave(repeats, 1)))
            rows.append(own)
    return torch.zeros_like(query).index_copy(0, torch.cat(rows), torch.cat(pieces))


def _rows(groups: Groups, segment: int) -> Tensor:
    first, length = groups.segments[segment].tolist()
    return torch.arange(first, first + length)
