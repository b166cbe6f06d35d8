"""The ratios that flatpeak should reach against other libraries, set before any measurement."""

from __future__ import annotations

from benchmarks.harness.statistics import Target


def engine_target(row: str, contender: str) -> Target | None:
    """Tokens per CPU-second of rollouts."""
    size, lengths = row.split(", ", 1)
    if contender == "vLLM":
        skewed = {"1M": Target(must=3, aim=4.5), "7M": Target(must=1.7, aim=2.4)}
        uniform = {"1M": Target(must=2.5, aim=2.5), "7M": Target(must=1.6, aim=1.6)}
        return (skewed if lengths.startswith("skewed") else uniform).get(size)
    if contender == "transformers generate":
        return Target(must=3, aim=5) if lengths.startswith("skewed") else Target(must=1.2, aim=1.5)
    return None


def step_target(row: str, contender: str) -> Target | None:
    """Response tokens per CPU-second of whole steps."""
    size, lengths = row.split(", ", 1)
    if contender.endswith("threads"):
        return None
    if contender == "flatpeak, torch":
        return {"1M": Target(must=2, aim=2.6), "7M": Target(must=1.5, aim=1.8)}.get(size)
    if lengths == "skewed":
        return Target(must=3, aim=5) if size == "1M" else Target(must=2.5, aim=4)
    return Target(must=1.5, aim=2.5) if lengths == "uniform, long prompts" else Target(must=1.0, aim=1.5)


def training_pass_target(row: str, contender: str) -> Target | None:
    """The shared pass against the padded pass."""
    if contender != "padded":
        return None
    return Target(must=4, aim=5.5) if "256" in row else Target(must=2, aim=2.7)


def mixed_lengths_target(row: str, contender: str) -> Target | None:
    """Long and short prompts together: at most one and a half times the sum of their separate times."""
    return Target(must=0.67, aim=1.0)


def memory_target(row: str, contender: str) -> Target | None:
    """Peak memory of a step."""
    return Target(must=0.6, aim=0.4, lower=True)


def adapters_target(row: str, contender: str) -> Target | None:
    """LoRA: not slower than training all weights, and faster than TRL's."""
    return Target(must=1.0, aim=1.2) if contender in ("flatpeak, all weights", "TRL LoRA") else None


def time_target(row: str, contender: str) -> Target | None:
    """CPU time until the goal."""
    return Target(must=0.5, aim=0.3, lower=True)


def two_threads_target(part: str) -> Target | None:
    """A real model's part on two threads over one, in wall time; the product's ratio shows the machine's limit."""
    return None if part == "product" else Target(must=1.7, aim=1.7)


def share_target(part: str) -> Target | None:
    """A real model's part as a share of a large product."""
    shares = {"decode": Target(must=0.65, aim=0.75), "training": Target(must=0.6, aim=0.7)}
    return shares.get(part)


def real_model_target(row: str, contender: str) -> Target | None:
    """Tokens per CPU-second of a real model's rollouts and steps."""
    rollouts = {"vLLM": Target(must=2, aim=2), "transformers generate": Target(must=3, aim=3)}
    if row == "rollouts":
        return rollouts.get(contender)
    return Target(must=2, aim=3) if contender.startswith("TRL") else None
