"""Random recipes: tiny runs that combine settings as no hand-written test does. A case is a function of its seed."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

STEPS = 4
SFT_STEPS = 2
TINY = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 2}
NEOX = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
WINDOW = {"sliding_window": 5}
MIXED_LAYERS = {"layer_types": ["sliding_attention", "full_attention"]}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "gemma": {**TINY, "head_dim": 8},
    "gemma2": {**TINY, **WINDOW, **MIXED_LAYERS, "head_dim": 8, "attn_logit_softcapping": 0.5},
    "gemma3_text": {**TINY, **WINDOW, **MIXED_LAYERS, "head_dim": 8},
    "gpt2": GPT2,
    "granite": {**TINY, "logits_scaling": 4.0, "attention_multiplier": 0.2},
    "llama": TINY,
    "mistral": {**TINY, **WINDOW},
    "olmo2": TINY,
    "phi": {**TINY, "num_key_value_heads": 2, "partial_rotary_factor": 0.5},
    "phi3": {**TINY, **WINDOW},
    "qwen2": {**TINY, "tie_word_embeddings": True},
    "qwen3": {**TINY, "head_dim": 8},
    "smollm3": {**TINY, "no_rope_layers": [1, 0]},
    "starcoder2": {**TINY, **WINDOW},
    "gpt_neox": NEOX,
    "stablelm": {**TINY, "num_key_value_heads": 2},
}
"""Every family that the native engine serves, and two that fall back to `generate`."""
NORMALIZATIONS = ("sequence_mean", "constant", "token_mean", "longest", "sequence_sum")
REWARDS = ("parity", "length", "dead", "seldom", "missing")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A recipe, what is asked and rewarded, and where its run is interrupted."""

    seed: str
    recipe: dict[str, Any]
    long_prompt: int | None
    """One question of so many characters among short ones; None: generated sums."""
    reward: str
    stop: tuple[str, int]
    """Stage and step after which the run ends early."""
    kill: bool
    """Without a word, instead of by a signal."""


def draw(seed: str) -> Case:
    """The case of this seed, the same on every machine."""
    rng = random.Random(seed)
    new_tokens = rng.choice([1, 2, 4, 9, 24])
    long_prompt = rng.choice([None, None, 9, 60, 200])
    sft = rng.random() < 0.3
    advantage, rollout = _advantage(rng), _rollout(rng, new_tokens)
    recipe = {
        "run": {"name": "fuzz", "seed": rng.randrange(1000), "checkpoint_every": rng.choice([0, 1, 2])},
        "model": _model(rng, context=(long_prompt or 6) + new_tokens + rng.choice([0, 1, 40])),
        "rollout": rollout,
        "advantage": advantage,
        "objective": _objective(rng, new_tokens),
        "optimizer": _optimizer(rng),
        "training": _training(rng, groups=rollout["prompts_per_step"], baseline=advantage["baseline"] != "none"),
        "evaluation": {
            "every": rng.choice([0, 2]),
            "metric": "reward",
            "samples": rng.choice([0, 2]),
            "size": rng.choice([None, 1]),
        },
    }
    if long_prompt is None:
        recipe["task"] = {"type": "arithmetic", "max_value": 9, "train_size": 12, "test_size": 4}
        if rng.random() < 0.3:
            recipe["curriculum"] = _curriculum(rng)
    elif rng.random() < 0.3:
        recipe["prompt"] = {"max_tokens": rng.choice([4, 30]), "overlong": rng.choice(["drop", "truncate_left"])}
    if rng.random() < 0.5:
        recipe |= _reference(rng)
    if rng.random() < 0.4:
        recipe["gradient_regularization"] = _regularization(rng, dtype=recipe["model"]["dtype"])
    if sft:
        recipe["sft"] = _sft(rng)
    stages = [("train", step) for step in range(1, STEPS)] + [("sft", 1)] * sft
    return Case(
        seed=seed,
        recipe=recipe,
        long_prompt=long_prompt,
        reward=rng.choice(REWARDS),
        stop=rng.choice(stages),
        kill=rng.random() < 0.4,
    )


def _maybe(rng: random.Random, chance: float, section: dict[str, Any]) -> dict[str, Any]:
    return section if rng.random() < chance else {}


def _model(rng: random.Random, *, context: int) -> dict[str, Any]:
    architecture = rng.choice(sorted(ARCHITECTURES))
    positions = "n_positions" if architecture == "gpt2" else "max_position_embeddings"
    config = {
        **ARCHITECTURES[architecture],
        positions: context,
        # With transformers' 0.02 all tokens are about equally likely and attention hardly matters.
        "initializer_range": rng.choice([0.02, 0.15, 0.3]),
        **_maybe(rng, 0.1, {"attn_pdrop" if architecture == "gpt2" else "attention_dropout": 0.2}),
    }
    return {
        "new": {"architecture": architecture, "config": config},
        "device": "cpu",
        "dtype": rng.choice(["float32", "float32", "float32", "bfloat16"]),
        **_maybe(rng, 0.1, {"dropout": True}),
    }


def _rollout(rng: random.Random, new_tokens: int) -> dict[str, Any]:
    return {
        "prompts_per_step": rng.choice([2, 3, 4, 5, 10]),
        "group_size": rng.choice([2, 3, 4, 8]),
        "max_new_tokens": new_tokens,
        "temperature": rng.choice([0.5, 1.0, 1.0, 1.5]),
        "max_rows": rng.choice([1, 3, 5, 512]),
        **_maybe(rng, 0.1, {"top_p": 0.9}),
        **_maybe(rng, 0.1, {"top_k": 3}),
        **_maybe(rng, 0.15, {"min_new_tokens": rng.randint(1, min(4, new_tokens + 1))}),
        **_maybe(rng, 0.2, {"stop": rng.choice([["3"], ["=", "12"]])}),
        **_maybe(rng, 0.15, {"engine": "generate"}),
        **_maybe(rng, 0.2, {"batch_invariant": False}),
    }


def _advantage(rng: random.Random) -> dict[str, Any]:
    baseline = rng.choice(["mean", "mean", "leave_one_out", "none"])
    scale = "none" if baseline == "none" else rng.choice(["std", "batch_std", "none"])
    return {"baseline": baseline, "scale": scale}


def _objective(rng: random.Random, new_tokens: int) -> dict[str, Any]:
    loss = rng.choice(["clipped_surrogate", "unclipped_surrogate", "policy_gradient", "truncated_policy_gradient"])
    section: dict[str, Any] = {"loss": loss, "normalization": rng.choice(NORMALIZATIONS)}
    if loss == "clipped_surrogate":
        section |= _maybe(rng, 0.5, {"clip_low": rng.choice([3e-4, 0.1]), "clip_high": 0.28})
        section |= _maybe(rng, 0.3, {"dual_clip": 1.5})
    if loss == "truncated_policy_gradient":
        section |= _maybe(rng, 0.5, {"cap": 1.01})
    if loss != "policy_gradient":
        section |= _maybe(rng, 0.3, {"ratio": "sequence"})
    section |= _maybe(rng, 0.3, {"entropy_coefficient": rng.choice([0.01, -0.01])})
    section |= _maybe(rng, 0.6, {"truncated": rng.choice(["mask", "zero_reward", "soft_penalty"])})
    if section.get("truncated") == "soft_penalty":
        section["overlong_buffer"] = max(1, new_tokens // 2)
    # Now and then what contradicts the rest, which has to be refused.
    return section | _maybe(rng, 0.05, rng.choice([{"cap": 2.0}, {"dual_clip": 3.0}, {"overlong_buffer": new_tokens}]))


def _optimizer(rng: random.Random) -> dict[str, Any]:
    name = rng.choice(["adamw", "adamw", "adamw", "sgd", "adamw_8bit"])
    return {
        "name": name,
        "learning_rate": 0.1 if name == "sgd" else rng.choice([1e-3, 1e-2]),
        "schedule": rng.choice(["constant", "linear", "cosine"]),
        "warmup_steps": rng.choice([0, 2]),
        "weight_decay": rng.choice([0.0, 0.1]),
        "max_grad_norm": rng.choice([None, 1.0]),
    }


def _training(rng: random.Random, *, groups: int, baseline: bool) -> dict[str, Any]:
    of_groups = rng.random() < 0.7
    return {
        "steps": STEPS,
        "epochs_per_rollout": rng.choice([1, 1, 2]),
        "minibatches": rng.choice([1, 1, 2, min(3, groups) if of_groups else 5]),
        "minibatch_of": "groups" if of_groups else "completions",
        "micro_batch_tokens": rng.choice([None, 1, 7, 40]),
        "activation_checkpointing": rng.random() < 0.2,
        **_maybe(rng, 0.3 * baseline, {"dynamic_sampling": {"max_resamples": rng.choice([1, 2])}}),
    }


def _curriculum(rng: random.Random) -> dict[str, Any]:
    task = {"type": "arithmetic", "max_value": 5, "train_size": 5, "test_size": 2}
    return {"task": task, "steps": rng.choice([1, 2, 3]), **_maybe(rng, 0.5, {"until_pass_rate": 0.5})}


def _reference(rng: random.Random) -> dict[str, Any]:
    placement = rng.choice(["loss", "loss", "reward"])
    estimator = rng.choice(["k1", "k2", "k3"])
    # k1 in the loss has no gradient by itself.
    weighted = placement == "loss" and (estimator == "k1" or rng.random() < 0.3)
    kl = {
        "coefficient": rng.choice([0.0, 0.05]),
        "estimator": estimator,
        "placement": placement,
        **({"ratio_weighted": True} if weighted else {}),
    }
    rule = rng.choice([{}, {"keep": True}, {"reset_every": 2}, {"reset_at_kl": 1e-3, "reset_optimizer": True}])
    return {"kl": kl, "reference": rule}


def _regularization(rng: random.Random, *, dtype: str) -> dict[str, Any]:
    section = {
        "strength": rng.choice([0.01, 0.3, "ratio:0.3"]),
        "ratio_mode": rng.choice(["importance", "reuse", "importance_clipped"]),
        "difference": rng.choice(["forward", "forward", "central"]),
        "perturbed": rng.choice(["blocks", "all", "last_layer", "last_block"]),
        "penalty": rng.choice(["squared_norm", "norm"]),
        "every": rng.choice([1, 1, 2]),
        "group_fraction": rng.choice([1.0, 1.0, 0.5]),
        **_maybe(rng, 0.2, {"kl_in_penalty": False}),
        **_maybe(rng, 0.2, {"warmup_updates": 2}),
    }
    # In bfloat16 the default step drowns in rounding, and is refused.
    return section | ({"step": 0.02} if dtype == "bfloat16" else {})


def _sft(rng: random.Random) -> dict[str, Any]:
    return {
        "steps": SFT_STEPS,
        "batch_size": rng.choice([1, 5, 16]),
        "normalization": rng.choice(NORMALIZATIONS),
        "optimizer": {"learning_rate": 1e-2, "name": rng.choice(["adamw", "sgd"])},
    }
