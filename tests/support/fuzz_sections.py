"""Random sections of a recipe that say how it trains: objective, optimizer, reference, penalty, SFT."""

from __future__ import annotations

import random
from typing import Any

STEPS = 4
SFT_STEPS = 2
FILES = "FILES"
"""The directory, in a recipe that is drawn, of a case's files; see `fuzz.write_files`."""
NORMALIZATIONS = ("sequence_mean", "constant", "token_mean", "longest", "sequence_sum")


def maybe(rng: random.Random, chance: float, section: dict[str, Any]) -> dict[str, Any]:
    """A section now and then, else nothing."""
    return section if rng.random() < chance else {}


def objective(rng: random.Random, new_tokens: int) -> dict[str, Any]:
    """The section `objective`."""
    loss = rng.choice(["clipped_surrogate", "unclipped_surrogate", "policy_gradient", "truncated_policy_gradient"])
    section: dict[str, Any] = {"loss": loss, "normalization": rng.choice(NORMALIZATIONS)}
    if loss == "clipped_surrogate":
        section |= maybe(rng, 0.5, {"clip_low": rng.choice([3e-4, 0.1]), "clip_high": 0.28})
        section |= maybe(rng, 0.3, {"dual_clip": 1.5})
    if loss == "truncated_policy_gradient":
        section |= maybe(rng, 0.5, {"cap": 1.01})
    if loss != "policy_gradient":
        section |= maybe(rng, 0.3, {"ratio": "sequence"})
    section |= maybe(rng, 0.1, {"sampler_correction": _correction(rng)})
    section |= maybe(rng, 0.3, {"entropy_coefficient": rng.choice([0.01, -0.01])})
    if new_tokens > 1:
        section |= maybe(rng, 0.2, {"truncated": "soft_penalty", "overlong_buffer": new_tokens // 2})
    section |= maybe(rng, 0.4, {"truncated": rng.choice(["mask", "zero_reward"])})
    if "overlong_buffer" in section and section["truncated"] != "soft_penalty":
        del section["overlong_buffer"]
    if rng.random() < 0.06:
        return {"loss": f"{FILES}/functions.py:loss", "normalization": section["normalization"]}
    # Now and then what contradicts the rest, which has to be refused.
    return section | maybe(rng, 0.05, rng.choice([{"cap": 2.0}, {"dual_clip": 3.0}, {"overlong_buffer": new_tokens}]))


def _correction(rng: random.Random) -> dict[str, Any]:
    kind = rng.choice(["truncate", "mask"])
    return {"type": kind, "level": rng.choice(["token", "sequence"]), "cap": rng.choice([1.0, 2.0])}


def advantage(rng: random.Random) -> dict[str, Any]:
    """The section `advantage`."""
    baseline = rng.choice(["mean", "mean", "leave_one_out", "none"])
    scale = "none" if baseline == "none" else rng.choice(["std", "batch_std", "none"])
    own = {"function": f"{FILES}/functions.py:advantage"}
    return own if rng.random() < 0.06 else {"baseline": baseline, "scale": scale}


def optimizer(rng: random.Random) -> dict[str, Any]:
    """The section `optimizer`."""
    name = rng.choice(["adamw", "adamw", "adamw", "sgd", "adamw_8bit"])
    return {
        "name": name,
        "learning_rate": 0.1 if name == "sgd" else rng.choice([1e-3, 1e-2]),
        "schedule": rng.choice(["constant", "linear", "cosine"]),
        "warmup_steps": rng.choice([0, 2]),
        "weight_decay": rng.choice([0.0, 0.1]),
        "max_grad_norm": rng.choice([None, 1.0]),
        **maybe(rng, 0.15, {"offload": True}),
        **maybe(rng, 0.1, {"final_fraction": 0.5}),
    }


def training(rng: random.Random, *, groups: int, baseline: bool) -> dict[str, Any]:
    """The section `training`, which may end the run early."""
    of_groups = rng.random() < 0.7
    return {
        "steps": STEPS,
        "epochs_per_rollout": rng.choice([1, 1, 2]),
        "minibatches": rng.choice([1, 1, 2, min(3, groups) if of_groups else 5]),
        "minibatch_of": "groups" if of_groups else "completions",
        "micro_batch_tokens": rng.choice([None, 1, 7, 40]),
        "activation_checkpointing": rng.random() < 0.2,
        **maybe(rng, 0.3 * baseline, {"dynamic_sampling": {"max_resamples": rng.choice([1, 2])}}),
        **maybe(rng, 0.1, {"stop_at": rng.choice([0.3, 1.0])}),
        **maybe(rng, 0.15, {"stop_when": _condition(rng)}),
    }


def _condition(rng: random.Random) -> dict[str, Any]:
    metric, value = rng.choice([("reward/mean", 0.5), ("policy/entropy", 1.5), ("optimizer/learning_rate", 1e-3)])
    return {"metric": metric, rng.choice(["above", "below"]): value, "window": rng.choice([1, 2])}


def reference(rng: random.Random) -> dict[str, Any]:
    """The sections `kl` and `reference`."""
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


def regularization(rng: random.Random, *, dtype: str, adapters: bool) -> dict[str, Any]:
    """The section `gradient_regularization`."""
    section = {
        "strength": rng.choice([0.01, 0.3, "ratio:0.3", "calibrated:0.3"]),
        "ratio_mode": rng.choice(["importance", "reuse", "importance_clipped"]),
        "difference": rng.choice(["forward", "forward", "forward", "central", "exact"]),
        "perturbed": "adapters" if adapters else rng.choice(["blocks", "all", "last_layer", "last_block", ["*.1.*"]]),
        "penalty": rng.choice(["squared_norm", "norm"]),
        "every": rng.choice([1, 1, 2]),
        "group_fraction": rng.choice([1.0, 1.0, 0.5]),
        **maybe(rng, 0.2, {"kl_in_penalty": False}),
        **maybe(rng, 0.2, {"warmup_updates": 2}),
        **maybe(rng, 0.2, {"delay_updates": 1}),
        **maybe(rng, 0.3, {"check_every": rng.choice([0, 1, 3])}),
        **maybe(rng, 0.1, {"min_perturbation_kept": 0.0}),
    }
    if rng.random() < 0.2:
        section |= {"direction": "random", "every": 1}
    if rng.random() < 0.15:
        section |= {"step": 1e-3, "step_scale": rng.choice(["radius", "absolute"])}
    # In bfloat16 the default step drowns in rounding, and is refused; the long one is, too, of some models.
    return section | ({"step": rng.choice([0.002, 0.002, 0.02])} if dtype == "bfloat16" else {})


def sft(rng: random.Random) -> dict[str, Any]:
    """The section `sft`."""
    return {
        "steps": SFT_STEPS,
        "batch_size": rng.choice([1, 5, 16]),
        "normalization": rng.choice(NORMALIZATIONS),
        "optimizer": {"learning_rate": 1e-2, "name": rng.choice(["adamw", "sgd"])},
        **maybe(rng, 0.2, {"stop_at": 0.5, "check_every": 1, "check_size": 2}),
    }
