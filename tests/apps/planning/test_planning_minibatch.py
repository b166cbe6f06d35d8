"""The largest micro-batch that the cutting of minibatches may leave, counted by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from flatpeak.apps.planning.workload import plan_minibatch, plan_sft_minibatch, plan_workload
from flatpeak.errors import UserError
from support.plans import sums_recipe

WORK = replace(plan_workload(sums_recipe())[0], prompt_lengths=(30, 20, 10, 10), group_size=4, new_tokens=50)
"""Four groups of 230, 220, 210 and 210 tokens."""


def cut(budget: int, *, padded: bool = False, **training: Any) -> tuple[tuple[int, ...], list[int], bool, int]:
    """(prompts, completions, whether there are others, tokens) of the largest micro-batch."""
    minibatch = plan_minibatch(sums_recipe(training=training), WORK, token_budget=budget, padded=padded)
    batch = minibatch.micro_batch
    return tuple(map(len, batch.prompts)), batch.lengths_N.tolist(), minibatch.several, minibatch.tokens


def test_a_minibatch_within_the_budget_is_one_micro_batch() -> None:
    assert cut(870) == ((30, 20, 10, 10), [50] * 16, False, 870)
    assert cut(870, minibatches=2) == ((30, 20), [50] * 8, False, 450)
    assert cut(870, minibatches=2, minibatch_of="completions") == ((30, 20, 10, 10), [50] * 8, False, 470)


def test_a_budget_is_filled_up_with_shorter_completions_of_one_group_more() -> None:
    # Two groups have 450 tokens; three with completions of 45 have 60 + 12 * 45 = 600.
    assert cut(600) == ((30, 20, 10), [45] * 12, True, 600)
    assert cut(450) == ((30, 20), [50] * 8, True, 450)


def test_a_group_that_exceeds_the_budget_is_cut_between_completions() -> None:
    # The prompt of 30 leaves 90 tokens: two completions of 45, rather than one of 50.
    assert cut(120) == ((30,), [45] * 2, True, 120)
    assert cut(60) == ((30,), [50], True, 80)


def test_padded_completions_have_a_prompt_each() -> None:
    assert cut(330, padded=True) == ((30,), [50] * 4, True, 320)
    assert cut(10_000, padded=True) == ((30,), [50] * 16, False, 1280)


def test_demonstrations_have_a_prompt_each() -> None:
    work = replace(WORK, demonstrations=((30, 8), (20, 12), (10, 5)))
    minibatch = plan_sft_minibatch(work, token_budget=1000, padded=False)
    # Every target is taken to be as long as the longest.
    assert (minibatch.tokens, minibatch.several) == (30 + 20 + 10 + 3 * 12, False)
    cut_short = plan_sft_minibatch(work, token_budget=80, padded=False)
    # Two whole ones have 74 tokens, and all three with targets of 6 have 78.
    assert (cut_short.tokens, cut_short.several) == (30 + 20 + 10 + 3 * 6, True)


def test_sft_without_demonstrations_is_an_error() -> None:
    with pytest.raises(UserError, match="no training row has a rationale"):
        plan_sft_minibatch(replace(WORK, demonstrations=()), token_budget=80, padded=False)
