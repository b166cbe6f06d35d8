"""The sentence about steps from which nothing could be learned, for the terminal and for the report."""

from __future__ import annotations


def silence(
    scope: str,
    *,
    reward: float | None,
    truncated: float,
    unanswered: float | None,
    limit: int | None,
    effect: str = "no weight changed",
) -> str:
    """`scope` ("the last 3 steps") had no group whose rewards differ; the figures that say why.

    `reward` is the mean, None where every score is missing; `truncated` and `unanswered` are shares of completions, the
    latter None where it is not known; `limit` is rollout.max_new_tokens, where that is known.
    """
    causes = ["no completion has a score" if reward is None else f"the mean reward is {reward:.3g}"]
    if unanswered:
        causes.append(f"no answer is found in {unanswered:.0%} of completions")
    causes.append(f"{truncated:.0%} are cut at rollout.max_new_tokens" + (f"={limit}" if limit else ""))
    listed = ", ".join(causes[:-1]) + f" and {causes[-1]}"
    return (
        f"no group of {scope} had rewards that differ, so {effect}: {listed}; see groups/informative_fraction in "
        "docs/metrics.md"
    )
