from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from flatpeak.errors import UserError
from flatpeak.evaluation.config import EvaluationConfig
from flatpeak.evaluation.evaluate import PolicyEvaluator
from flatpeak.evaluation.result import Evaluation
from flatpeak.functional import bootstrap_interval, wilson_interval
from flatpeak.rewards.reward_set import as_reward
from flatpeak.tasks.prompts import PromptConfig
from flatpeak.types import Completion, Example, Group, Prompt, SamplingParams, Score, Scores

GOLD = "7"


def correctness(completion: str, gold: str) -> float | None:
    """1 for the gold answer, 0.1 for another one in the right form, missing where the grader gives up."""
    if completion == "?":
        return None
    return 1.0 if completion == gold else 0.1 if completion.isdigit() else 0.0


class Script:
    """Gives each prompt its scripted texts: one greedily, the others when sampled."""

    def __init__(self, greedy: Sequence[str], sampled: Sequence[Sequence[str]] = ()) -> None:
        self.greedy, self.sampled = greedy, sampled
        self.asked: list[tuple[int, SamplingParams, int]] = []

    def generate(
        self, prompts: Sequence[Prompt], *, group_size: int, sampling: SamplingParams, seed: int
    ) -> list[Group]:
        self.asked.append((group_size, sampling, seed))
        texts = [[text] for text in self.greedy] if sampling.temperature == 0 else self.sampled
        return [
            Group(prompt=prompt, completions=tuple(completion(text) for text in row))
            for prompt, row in zip(prompts, texts, strict=True)
        ]


def completion(text: str) -> Completion:
    """As many tokens as characters; longer than three counts as cut."""
    return Completion(
        token_ids=(1,) * len(text),
        logprobs=(0.0,) * len(text),
        finish_reason="length" if len(text) > 3 else "stop",
        text=text,
    )


def questions(count: int, *, columns: Sequence[Mapping[str, object]] = ()) -> list[Prompt]:
    return [
        Prompt(
            id=f"q{index}",
            token_ids=(1,),
            text="3+4=",
            example=Example(id=f"q{index}", question="3+4=", gold=GOLD, columns=columns[index] if columns else {}),
        )
        for index in range(count)
    ]


def run(script: Script, prompts: Sequence[Prompt], **settings: object) -> Evaluation:
    return evaluated(script, prompts, as_reward(correctness, name="correctness"), EvaluationConfig(**settings))


def evaluated(script: Script, prompts: Sequence[Prompt], reward: Any, config: EvaluationConfig) -> Evaluation:
    evaluator = PolicyEvaluator(
        config=config,
        task="sums",
        prompts=prompts,
        sampler=script,
        reward=reward,
        max_new_tokens=5,
        stop=("#",),
        tokenizer=SimpleNamespace(),  # type: ignore[arg-type]
        prompt=PromptConfig(),
        longest_prompt=100,
    )
    return evaluator.evaluate()


def test_greedy_figures_are_means_over_the_questions() -> None:
    result = run(Script(["7", "8", "no", "7777"]), questions(4))
    assert result.metrics() == pytest.approx(
        {
            "accuracy": 0.25,
            "reward": (1 + 0.1 + 0 + 0.1) / 4,
            "correctness": 0.3,
            "length": (1 + 1 + 2 + 4) / 4,
            "truncated": 0.25,
            "missing": 0.0,
            "timeouts": 0.0,
        }
    )
    assert (result.task, result.size, result.ids) == ("sums", 4, ["q0", "q1", "q2", "q3"])


def test_wrong_but_well_formed_answers_are_wrong() -> None:
    result = run(Script(["8", "9"], [["8"] * 4, ["9", "1", "2", "3"]]), questions(2), samples=4, k=(1, 4))
    assert result.mean("correctness") == pytest.approx(0.1)
    for metric in ("accuracy", "sampled/accuracy", "pass@1", "pass@4", "maj@1", "maj@4"):
        assert result.mean(metric) == 0.0, metric


def test_pass_at_k_is_the_unbiased_estimate() -> None:
    # One of four right: 1 - C(3, k) / C(4, k); three of four right: 1 - C(1, k) / C(4, k).
    script = Script(["8", "8"], [["7", "8", "9", "1"], ["7", "7", "7", "8"]])
    result = run(script, questions(2), samples=4, k=(1, 2, 4))
    assert result.values["pass@1"] == pytest.approx([1 / 4, 3 / 4])
    assert result.values["pass@2"] == pytest.approx([1 / 2, 1.0])
    assert result.values["pass@4"] == pytest.approx([1.0, 1.0])
    assert result.mean("sampled/accuracy") == pytest.approx(0.5)


def test_maj_at_k_is_what_most_of_the_draws_answer() -> None:
    # Three 8s outvote one 7 for good; with two of each a tie is broken evenly; of any three draws two are 7.
    script = Script(["8"] * 3, [["7", "8", "8", "8"], ["7", "7", "8", "8"], ["7", "7", "7", "8"]])
    result = run(script, questions(3), samples=4, k=(1, 3, 4))
    assert result.values["maj@4"] == pytest.approx([0.0, 0.5, 1.0])
    assert result.values["maj@1"] == pytest.approx([0.25, 0.5, 0.75])
    assert result.values["maj@3"] == pytest.approx([0.0, 0.5, 1.0])


def test_missing_verdicts_leave_the_figures_instead_of_counting_as_wrong() -> None:
    script = Script(["7", "?", "8"], [["7", "?", "7", "8"], ["?", "?", "?", "7"], ["?", "?", "?", "?"]])
    result = run(script, questions(3), samples=4, k=(1, 2))
    assert result.values["accuracy"] == [1.0, None, 0.0]
    assert result.mean("accuracy") == 0.5
    assert result.values["sampled/accuracy"] == pytest.approx([2 / 3, 1.0, None])
    assert result.values["pass@1"] == pytest.approx([2 / 3, 1.0, None])
    # Two draws need two verdicts: of the second question only one is left.
    assert result.values["pass@2"] == [1.0, None, None]
    assert result.mean("pass@2") == 1.0


def test_a_metric_that_no_question_has_is_nan_and_has_no_interval() -> None:
    result = run(Script(["?", "?"]), questions(2))
    assert math.isnan(result.mean("accuracy"))
    assert "accuracy" not in result.as_dict()["intervals"]


def test_intervals_are_wilsons_for_shares_and_the_bootstrap_of_the_known_values_elsewhere() -> None:
    result = run(Script(["7", "7", "8", "?", "8", "7"]), questions(6)).as_dict()
    assert result["intervals"]["accuracy"] == list(wilson_interval(3, 5))
    assert result["intervals"]["correctness"] == list(bootstrap_interval([1.0, 1.0, 0.1, 0.1, 1.0]))
    # Every answer has one token, which is no share of anything.
    assert result["intervals"]["length"] == [1.0, 1.0]
    methods = {name: result["methods"][name] for name in ("accuracy", "correctness", "length", "missing")}
    assert methods == {"accuracy": "wilson", "correctness": "bootstrap", "length": "bootstrap", "missing": "wilson"}


def test_a_figure_of_fewer_questions_says_of_how_many() -> None:
    result = run(Script(["7", "?", "8"], [["7", "8"], ["?", "7"], ["8", "8"]]), questions(3), samples=2, k=(1, 2))
    assert result.values["missing"] == [0.0, 1.0, 0.0]
    assert result.values["sampled/missing"] == [0.0, 0.5, 0.0]
    assert result.as_dict()["counted"] == {"accuracy": 2, "reward": 2, "correctness": 2, "pass@2": 2, "maj@2": 2}


def test_an_answer_that_ran_out_of_time_is_wrong_and_counted() -> None:
    class Late:
        """0 where an answer took too long, in one of two parts."""

        def __call__(self, groups: Sequence[Group]) -> Scores:
            late = [[c.text == "?" for c in group.completions] for group in groups]
            scores: list[list[Score]] = [[float(c.text == GOLD) for c in group.completions] for group in groups]
            return Scores(total=scores, parts={"correctness": scores, "other": scores}, timed_out={"other": late})

        def answer(self, name: str, completion: Completion, prompt: Prompt) -> str | None:
            return completion.text

        def is_function(self, name: str) -> bool:
            return False

        def check(self) -> None:
            pass

    script = Script(["7", "?", "8"], [["7", "?"], ["?", "?"], ["8", "7"]])
    result = evaluated(script, questions(3), Late(), EvaluationConfig(samples=2))
    assert result.values["timeouts"] == [0.0, 1.0, 0.0]
    assert result.values["sampled/timeouts"] == [0.5, 1.0, 0.0]
    assert result.values["accuracy"] == [1.0, 0.0, 0.0]
    assert result.values["missing"] == [0.0, 0.0, 0.0]


class Reads:
    """Right is the gold answer; an answer is read only where there is a digit."""

    def __call__(self, groups: Sequence[Group]) -> Scores:
        scores: list[list[Score]] = [[correctness(c.text, GOLD) for c in group.completions] for group in groups]
        return Scores(total=scores, parts={"correctness": scores})

    def answer(self, name: str, completion: Completion, prompt: Prompt) -> str | None:
        assert name == "correctness"
        return completion.text[:1] if completion.text[:1].isdigit() else None

    def is_function(self, name: str) -> bool:
        return False

    def check(self) -> None:
        pass


def test_answers_that_cannot_be_read_are_counted() -> None:
    script = Script(["7", "none", "8"], [["7", "no"], ["x", "y"], ["8", "7"]])
    config = EvaluationConfig(samples=2)
    result = evaluated(script, questions(3), Reads(), config)
    assert result.values["extraction_failed"] == [0.0, 1.0, 0.0]
    assert result.values["sampled/extraction_failed"] == [0.5, 1.0, 0.0]
    assert [row["answer"] for row in result.rows] == ["7", None, "8"]
    assert result.rows[0]["samples_answers"] == ["7", None]


def test_where_nothing_says_right_there_are_rewards_and_no_accuracy() -> None:
    script = Script(["7", "no"], [["7", "8"], ["8", "8"]])
    result = run(script, questions(2), samples=2, accuracy=None, metric="reward")
    assert result.metrics() == pytest.approx(
        {"reward": 0.5, "correctness": 0.5, "length": 1.5, "truncated": 0.0, "missing": 0.0, "timeouts": 0.0}
        | {"sampled/reward": 0.325, "sampled/correctness": 0.325, "sampled/length": 1.0}
        | {"sampled/truncated": 0.0, "sampled/missing": 0.0, "sampled/timeouts": 0.0}
    )
    assert result.headline == "reward"
    assert "answer" not in result.rows[0]


def test_a_protocol_that_only_samples_asks_nothing_greedily() -> None:
    script = Script([], [["7", "8"], ["8", "7"]])
    result = run(script, questions(2), greedy=False, samples=2, metric="sampled/accuracy", stop=("!",))
    assert [(size, sampling.temperature, sampling.stop) for size, sampling, _ in script.asked] == [(2, 1.0, ("!",))]
    assert result.pass_rate == result.mean("sampled/accuracy") == 0.5
    assert not {"accuracy", "reward", "length"} & result.values.keys()
    assert result.rows[1]["samples"] == ["8", "7"]


def test_an_accuracy_that_is_no_part_of_the_reward_is_refused() -> None:
    with pytest.raises(UserError, match="accuracy=truth is not a part of the reward: choose one of correctness"):
        run(Script(["7"]), questions(1), accuracy="truth")


def test_questions_with_near_neighbours_in_training_are_told_apart() -> None:
    columns = [{"near_train": True}, {"near_train": False}, {"near_train": False}, {"near_train": True}]
    result = run(Script(["7", "7", "8", "7"]), questions(4, columns=columns))
    assert result.mean("accuracy") == 0.75
    assert result.values["accuracy/not_near_train"] == [None, 1.0, 0.0, None]
    assert result.mean("accuracy/not_near_train") == 0.5
    assert "accuracy/not_near_train" not in run(Script(["7"]), questions(1)).values


def test_greedy_and_sampled_decoding_use_the_evaluation_settings() -> None:
    script = Script(["7"], [["7", "8"]])
    run(script, questions(1), samples=2, temperature=0.7, top_p=0.9, top_k=5, max_new_tokens=11, seed=4)
    greedy, sampled = script.asked
    assert greedy == (1, SamplingParams(temperature=0.0, max_new_tokens=11, stop=("#",)), 4)
    assert sampled == (
        2,
        SamplingParams(temperature=0.7, top_p=0.9, top_k=5, max_new_tokens=11, stop=("#",)),
        4,
    )


def test_without_a_limit_of_its_own_evaluation_takes_the_rollouts_limit() -> None:
    script = Script(["7"])
    run(script, questions(1))
    assert script.asked[0][1].max_new_tokens == 5
    assert len(script.asked) == 1


def test_the_first_questions_are_what_a_smaller_evaluation_sees() -> None:
    texts = ["7", "8", "7", "7", "8"]
    whole = run(Script(texts), questions(5))
    small = run(Script(texts[:3]), questions(3))
    assert whole.first(3).as_dict() == small.as_dict()
    assert whole.first(3).rows == small.rows
    assert whole.first(None) is whole.first(9) is whole


def test_rows_tell_what_was_answered() -> None:
    result = run(Script(["7", "8888"], [["7", "?"], ["8", "7"]]), questions(2), samples=2)
    assert result.rows[1] == {
        "id": "q1",
        "question": "3+4=",
        "gold": "7",
        "text": "8888",
        "finish_reason": "length",
        "length": 4,
        "answer": "8888",
        "scores": {"correctness": 0.1},
        "samples_correct": [0.0, 1.0],
        "samples_answers": ["8", "7"],
    }
    assert result.rows[0]["samples_correct"] == [1.0, None]
