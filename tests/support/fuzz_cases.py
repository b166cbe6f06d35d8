"""Random recipes: tiny runs that combine settings as no hand-written test does. A case is a function of its seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

from support import fuzz_sections as sections
from support.fuzz_sections import FILES, STEPS, maybe

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
REWARDS = ("parity", "length", "dead", "seldom", "missing", "recipe")
MOMENTS = ("sampling", "pass", "layer", "update", "evaluation", "save", "files", "link", "log")
SUMS = {"type": "arithmetic", "max_value": 9, "train_size": 12, "test_size": 4}
PRODUCTS = {**SUMS, "operators": ["*"]}
ROWS = {
    "type": "rows",
    "train": [{"path": f"{FILES}/rows.jsonl", "rationale": "answer"}],
    "test_fraction": 0.3,
    "bad_rows": "skip",
}


@dataclass(frozen=True, kw_only=True)
class Stop:
    """Where a run ends early: after a step of a stage, or within the calls of one of `fuzz.FUNCTIONS`."""

    where: str
    at: float
    """The step, or the share of the calls that an uninterrupted run makes."""
    kill: bool
    """Without a word, instead of by a signal."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A recipe, what is asked and rewarded, and where its run is interrupted."""

    seed: str
    recipe: dict[str, Any]
    long_prompt: int | None
    """One question of so many characters among short ones; None: the recipe's task."""
    reward: str
    """How `fuzz.Scorer` scores; recipe: the recipe's rewards do."""
    stops: tuple[Stop, ...]
    """The ends of the first start, and of the one after it."""
    base: dict[str, Any] | None = None
    """The section `model` of a model that is saved first, for adapters of it."""
    memory: tuple[str, int] | None = None
    """What does not fit: micro-batches of more tokens, or more rows."""


def draw(seed: str, model: str | None = None) -> Case:
    """The case of this seed, the same on every machine; a `model` in a file is trained little."""
    rng = random.Random(seed)
    new_tokens = rng.choice([4, 8]) if model else rng.choice([1, 2, 4, 9, 24])
    long_prompt = None if model else rng.choice([None, None, None, 9, 60, 200])
    steps = 3 if model else STEPS
    has_sft, adapters = rng.random() < 0.3, rng.random() < (0.5 if model else 0.15)
    advantage, rollout = sections.advantage(rng), _rollout(rng, new_tokens)
    reward = rng.choice(REWARDS)
    recipe = {
        "run": _run(rng),
        "model": _model(rng, context=(long_prompt or 6) + new_tokens + rng.choice([0, 1, 40])),
        "rollout": rollout,
        "advantage": advantage,
        "objective": sections.objective(rng, new_tokens),
        "optimizer": sections.optimizer(rng),
        "training": sections.training(
            rng, groups=rollout["prompts_per_step"], baseline=advantage.get("baseline") != "none"
        ),
        "evaluation": _evaluation(rng, reward),
    }
    if long_prompt is None:
        recipe |= _tasks(rng)
    elif rng.random() < 0.3:
        recipe["prompt"] = {"max_tokens": rng.choice([4, 30]), "overlong": rng.choice(["drop", "truncate_left"])}
    if reward == "recipe":
        recipe["rewards"] = _rewards(rng)
    if rng.random() < 0.5:
        recipe |= sections.reference(rng)
    if rng.random() < 0.4:
        recipe["gradient_regularization"] = sections.regularization(
            rng, dtype=recipe["model"]["dtype"], adapters=adapters
        )
    if has_sft:
        recipe["sft"] = sections.sft(rng)
    base = recipe["model"] if adapters else None
    if base:
        recipe["model"] = {"path": f"{FILES}/base", "device": "cpu", "dtype": base["dtype"], **_adapters(rng)}
    memory = rng.choice([("tokens", 3), ("tokens", 12), ("rows", 2)]) if rng.random() < 0.12 else None
    case = Case(
        seed=seed,
        recipe=recipe,
        long_prompt=long_prompt,
        reward=reward,
        stops=_stops(rng, sft=has_sft, steps=steps, at_steps=memory is not None),
        base=base,
        memory=memory,
    )
    return case if model is None else _of_model(case, model, steps=steps)


def _of_model(case: Case, model: str, *, steps: int) -> Case:
    """The same of a real model, with few rollouts and without what takes long."""
    recipe = case.recipe
    recipe["model"] = {**{key: value for key, value in recipe["model"].items() if key != "new"}, "path": model}
    recipe["rollout"] |= {"prompts_per_step": 2, "group_size": 2}
    recipe["training"] |= {"steps": steps, "minibatches": min(2, recipe["training"]["minibatches"])}
    recipe["optimizer"]["learning_rate"] /= 100
    recipe["evaluation"] |= {"size": 1, "final_size": 1}
    recipe["evaluation"].pop("sharpness", None)
    if "gradient_regularization" in recipe:
        recipe["gradient_regularization"] |= {"difference": "forward"}
    if "curriculum" in recipe:
        recipe["curriculum"]["steps"] = min(2, recipe["curriculum"]["steps"])
    if "sft" in recipe:
        recipe["sft"] |= {"steps": 1, "batch_size": 2}
    return replace(case, base=None)


def _stops(rng: random.Random, *, sft: bool, steps: int, at_steps: bool) -> tuple[Stop, ...]:
    """One or two; where memory runs out, the step in which it does is not left in the middle by a signal.

    That step's checkpoint would have the smaller micro-batches, and the same step again other last bits.
    """
    stages = [("train", step) for step in range(1, steps)] + [("sft", 1)] * sft
    stops = []
    for share in (0.9, 0.5)[: 1 + (rng.random() < 0.3)]:
        where, at = rng.choice(stages) if rng.random() < 0.4 else (rng.choice(MOMENTS), share * rng.random())
        kill = rng.random() < 0.4 or (at_steps and where in MOMENTS)
        stops.append(Stop(where=where, at=at, kill=kill))
    return tuple(stops)


def _run(rng: random.Random) -> dict[str, Any]:
    return {
        "name": "fuzz",
        "seed": rng.randrange(1000),
        "checkpoint_every": rng.choice([0, 1, 2]),
        "keep_checkpoints": rng.choice([1, 2]),
        "log_rollouts_every": rng.choice([1, 1, 2]),
        "grading_timeout": 60.0,
    }


def _evaluation(rng: random.Random, reward: str) -> dict[str, Any]:
    samples = rng.choice([0, 2])
    metrics = ["reward", "reward", "accuracy", *(["pass@2", "sampled/reward"] if samples else [])]
    section = {
        "every": rng.choice([0, 1, 2]),
        "metric": rng.choice([*metrics, "spread"] if reward == "recipe" else metrics),
        "samples": samples,
        "k": [1, 2] if samples else [1],
        "size": rng.choice([None, 1]),
        **maybe(rng, 0.2, {"final_size": 2}),
        **maybe(rng, 0.08, {"sharpness": _sharpness(rng)}),
        **maybe(rng, 0.2, {"sets": {"large": {**SUMS, "min_value": 10, "max_value": 19, "test_size": 2}}}),
    }
    return section | maybe(rng, 0.1 * (samples > 0), {"greedy": False, "metric": "sampled/reward"})


def _sharpness(rng: random.Random) -> dict[str, Any]:
    return {"radii": [0.3], "draws": 1, "size": 2, "samples": 2, "eigenvalue": rng.random() < 0.3}


def _rewards(rng: random.Random) -> dict[str, Any]:
    """Parts that are graded by rules, in this process and in workers."""
    name = rng.choice(["one", "all", "group"])
    return {
        "correctness": {"type": "number"},
        "spread": {"type": "function", "function": f"{FILES}/functions.py:{name}"},
        **maybe(rng, 0.5, {"brevity": {"type": "length", "target": 1, "limit": 5, "weight": -0.2}}),
    }


def _tasks(rng: random.Random) -> dict[str, Any]:
    """A task or several, perhaps after an easier one."""
    tasks: dict[str, Any] = {"task": rng.choice([SUMS, SUMS, ROWS])}
    if rng.random() < 0.25:
        second = rng.choice([PRODUCTS, ROWS])
        tasks = {"tasks": [{"task": SUMS, "weight": rng.choice([1, 3])}, {"task": second, "name": "second"}]}
    return tasks | maybe(rng, 0.3, {"curriculum": _curriculum(rng)})


def _adapters(rng: random.Random) -> dict[str, Any]:
    lora = {
        "rank": rng.choice([1, 2, 4]),
        "alpha": 8,
        **maybe(rng, 0.2, {"dora": True}),
        **maybe(rng, 0.2, {"rslora": True}),
        **maybe(rng, 0.2, {"dropout": 0.2}),
    }
    return {"lora": lora, **maybe(rng, 0.2, {"quantization": "nf4"})}


def _model(rng: random.Random, *, context: int) -> dict[str, Any]:
    architecture = rng.choice(sorted(ARCHITECTURES))
    positions = "n_positions" if architecture == "gpt2" else "max_position_embeddings"
    config = {
        **ARCHITECTURES[architecture],
        positions: context,
        # With transformers' 0.02 all tokens are about equally likely and attention hardly matters.
        "initializer_range": rng.choice([0.02, 0.15, 0.3]),
        **maybe(rng, 0.1, {"attn_pdrop" if architecture == "gpt2" else "attention_dropout": 0.2}),
    }
    tokenizer = maybe(rng, 0.1, {"tokenizer": {"type": "bpe", "vocab_size": 40}})
    return {
        "new": {"architecture": architecture, "config": config, **tokenizer},
        "device": "cpu",
        "dtype": rng.choice(["float32", "float32", "float32", "bfloat16"]),
        **maybe(rng, 0.1, {"dropout": True}),
    }


def _rollout(rng: random.Random, new_tokens: int) -> dict[str, Any]:
    return {
        "prompts_per_step": rng.choice([2, 3, 4, 5, 10]),
        "group_size": rng.choice([2, 3, 4, 8]),
        "max_new_tokens": new_tokens,
        "temperature": rng.choice([0.5, 1.0, 1.0, 1.5]),
        "max_rows": rng.choice([1, 3, 5, 512]),
        **maybe(rng, 0.1, {"top_p": 0.9}),
        **maybe(rng, 0.1, {"top_k": 3}),
        **maybe(rng, 0.15, {"min_new_tokens": rng.randint(1, min(4, new_tokens))}),
        **maybe(rng, 0.2, {"stop": rng.choice([["3"], ["=", "12"]])}),
        **maybe(rng, 0.15, {"engine": "generate"}),
        **maybe(rng, 0.2, {"batch_invariant": False}),
        **maybe(rng, 0.1, {"kernels": "torch"}),
        **maybe(rng, 0.05, {"staleness": 1}),
    }


def _curriculum(rng: random.Random) -> dict[str, Any]:
    task = {"type": "arithmetic", "max_value": 5, "train_size": 5, "test_size": 2}
    return {"task": task, "steps": rng.choice([1, 2, 3]), **maybe(rng, 0.5, {"until_pass_rate": 0.5})}
