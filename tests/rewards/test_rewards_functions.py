from __future__ import annotations

import functools
import re

import pytest
import torch

from flatpeak.errors import UserError
from flatpeak.rewards.functions import FunctionReward
from flatpeak.utils.user_code import one_line


def scores_of(function, groups, **options):
    return FunctionReward(function, **options).score(groups).scores


def test_trl_functions_are_called_once_with_lists_over_all_completions(group):
    calls = []

    def reward(prompts, completions, completion_ids, gold, level, **kwargs):
        calls.append((prompts, completions, completion_ids, gold, level, sorted(kwargs)))
        return [0.0, 0.25, 0.5]

    groups = [group("a", "b", id="1", text="P1", gold="1", level=7), group("c", id="2", text="P2", gold="2", level=8)]
    assert scores_of(reward, groups) == [[0.0, 0.25], [0.5]]
    assert calls == [
        (
            ["P1", "P1", "P2"],
            ["a", "b", "c"],
            [[0], [0], [0]],
            ["1", "1", "2"],
            [7, 7, 8],
            ["golds", "question", "rationale"],
        )
    ]


def test_trl_functions_see_chats_as_messages(group):
    seen = {}

    def reward(prompts, completions):
        seen.update(prompts=prompts, completions=completions)
        return [1.0]

    scores_of(reward, [group("hi", messages=[{"role": "user", "content": "Hello"}])])
    assert seen["prompts"] == [[{"role": "user", "content": "Hello"}]]
    assert seen["completions"] == [[{"role": "assistant", "content": "hi"}]]


def test_trls_own_rewards_work_unchanged(group):
    trl_rewards = pytest.importorskip("trl.rewards")
    chat = [{"role": "user", "content": "Hello"}]
    groups = [group("<think>a</think>b", "b", messages=chat)]
    assert scores_of(trl_rewards.think_format_reward, groups) == [[1.0, 0.0]]
    assert scores_of(trl_rewards.get_soft_overlong_punishment(2, 1), groups) == [[0.0, 0.0]]


def test_group_functions_see_one_group_at_a_time(group):
    def rank(group, level):
        return [level + index / 10 for index, _ in enumerate(group.completions)]

    assert scores_of(rank, [group("a", "b", level=1), group("c", level=2)]) == [[1.0, 1.1], [2.0]]


def test_completion_functions_see_one_text_and_columns_by_name(group):
    def reward(completion, prompt, question, gold, rationale, level):
        return float((completion, prompt, question, gold, rationale, level) == ("a", "P", "How many?", "18", None, 3))

    assert scores_of(reward, [group("a", "b", text="P", level=3)]) == [[1.0, 0.0]]


def test_keyword_functions_get_every_column(group):
    def reward(completion, **columns):
        return float(sorted(columns) == ["gold", "golds", "level", "prompt", "question", "rationale"])

    assert scores_of(reward, [group("a", level=3)]) == [[1.0]]


def test_the_examples_own_fields_win_over_columns_of_their_name(group):
    groups = [group("a", gold="18", **{"question": "raw", "level": 1})]
    assert scores_of(lambda completion, question: float(question == "How many?"), groups) == [[1.0]]


def test_columns_with_a_default_may_be_missing(group):
    assert scores_of(lambda completion, level=5: level, [group("a"), group("b", level=1)]) == [[5.0], [1.0]]


def test_in_lists_a_row_without_the_column_of_another_has_none(group):
    groups = [group("a"), group("b", level=1)]
    assert scores_of(lambda completions, level=None: [float(x is None) for x in level], groups) == [[1.0], [0.0]]


def test_configured_arguments_reach_every_call_and_win_over_columns(group):
    groups = [group("a", "b", level=1)]
    assert scores_of(lambda completion, level: level, groups, arguments={"level": 4}) == [[4.0, 4.0]]
    assert scores_of(lambda completion, **rest: rest["level"], groups, arguments={"level": 4}) == [[4.0, 4.0]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"levle": 1}, r"has no parameter 'levle', did you mean 'level'\?"),
        ({"completion": "x"}, r"'completion' is filled in by flatpeak"),
    ],
)
def test_arguments_that_cannot_be_passed_are_refused(arguments, message):
    def reward(completion, level):
        return 0.0

    with pytest.raises(UserError, match=message):
        FunctionReward(reward, arguments=arguments)


@pytest.mark.parametrize(
    ("asked", "row", "hint"),
    [
        ("solution", {}, "'gold'"),  # and not 'question', which is spelled more like it
        ("ground_truth", {}, "'gold'"),
        ("Labels", {"level": 1}, "'gold'"),
        ("solution", {"answer": "7"}, "'gold' or 'answer'"),
        ("problem", {}, "'question'"),
        ("reasoning", {}, "'rationale'"),
    ],
)
def test_a_column_by_the_name_it_has_elsewhere_is_told_its_own(group, asked, row, hint):
    scope = {}
    exec(f"def reward(completion, {asked}):\n    return 0.0", scope)
    with pytest.raises(UserError, match=rf"has no such column \(did you mean {hint}\?\): rename the parameter"):
        FunctionReward(scope["reward"]).score([group("a", id="1", **row)])


def test_a_missing_column_names_the_row_and_the_nearest_column(group):
    def reward(completion, levle):
        return 0.0

    with pytest.raises(
        UserError, match=r"parameter 'levle', but row '2' has no such column \(did you mean 'level'\?\)"
    ):
        FunctionReward(reward).score([group("a", id="1", levle=1), group("b", id="2", level=1)])


@pytest.mark.parametrize(
    "function",
    [
        lambda text: 0.0,
        lambda: 0.0,
        lambda **kwargs: 0.0,
        lambda completion, group: 0.0,
        lambda completion, /: 0.0,
        lambda first, /, completion: 0.0,
        max,
    ],
)
def test_any_other_signature_is_told_the_three_there_are(function):
    with pytest.raises(UserError) as caught:
        FunctionReward(function, name="mine")
    message = str(caught.value)
    assert message.startswith("reward function 'mine'") and "\n" not in message
    assert all(signature in message for signature in ("f(completions, ...)", "f(group, ...)", "f(completion, ...)"))


def test_partials_methods_and_callable_objects_are_functions(group):
    class Grader:
        def __call__(self, completion):
            return 0.5

        def method(self, completions):
            return [0.25] * len(completions)

    def scaled(scale, completion):
        return scale

    groups = [group("a")]
    assert scores_of(Grader(), groups) == [[0.5]]
    assert scores_of(Grader().method, groups) == [[0.25]]
    assert scores_of(functools.partial(scaled, scale=0.75), groups) == [[0.75]]
    names = [FunctionReward(f).name for f in (Grader(), Grader().method, functools.partial(scaled, scale=1))]
    assert names == ["Grader", "method", "scaled"]


def test_a_function_does_not_say_what_is_answered(completion, prompt):
    assert FunctionReward(lambda completion: 1.0).answer(completion(" 18\n"), prompt()) == "18"


def test_what_functions_log_is_kept_by_metric(group):
    def batch(completions, log_metric):
        log_metric("size", len(completions))
        return [1.0] * len(completions)

    def by_group(group, log_metric):
        log_metric("size", len(group.completions))
        return [1.0] * len(group.completions)

    def single(completion, *, log_metric):
        if completion != "b":
            log_metric("letter", torch.tensor(ord(completion)))
        return 1.0

    async def waiting(completion, log_metric):
        log_metric("letter", ord(completion))
        return 1.0

    groups = [group("a", "b", id="1"), group("c", id="2")]
    logged = [FunctionReward(function).score(groups).logged for function in (batch, by_group, single, waiting)]
    assert logged == [{"size": [3.0]}, {"size": [2.0, 1.0]}, {"letter": [97.0, 99.0]}, {"letter": [97.0, 98.0, 99.0]}]


def test_functions_with_any_keywords_are_not_given_log_metric(group):
    assert scores_of(lambda completion, **columns: float("log_metric" in columns), [group("a")]) == [[0.0]]


def test_a_metric_that_the_run_logs_itself_is_refused(group):
    def reward(completion, log_metric):
        log_metric("failed", 1)

    with pytest.raises(UserError, match=r"log_metric\('failed', ...\): the run logs a metric of that name: choose"):
        scores_of(reward, [group("a")])
    with pytest.raises(UserError, match="'log_metric' is filled in by flatpeak"):
        FunctionReward(reward, arguments={"log_metric": print})


def test_a_logged_value_that_is_no_number_is_an_error_of_the_call(group):
    def reward(completion, log_metric):
        log_metric("x", "many")
        return 1.0

    scored = FunctionReward(reward).score([group("a")])
    assert (scored.scores, scored.failed, scored.logged) == ([[None]], 1, {})
    message = (
        r"ValueError: log_metric\('x', ...\): the value is str 'many': give a number \(.*test_rewards_functions\.py"
    )
    assert re.match(message, one_line(scored.first_error))
