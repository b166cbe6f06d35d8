from __future__ import annotations

import inspect
import json
import pickle
import re
import subprocess
import sys
import time

import pytest

from flatpeak.errors import UserError
from flatpeak.rewards.config import ReasoningGymRewardConfig
from flatpeak.rewards.reasoning_gym import (
    ARITHMETIC,
    EVALUATED,
    MAX_CHARACTERS,
    MAX_PROGRAM,
    PARSED,
    ReasoningGymReward,
    admissible,
    restore,
)
from flatpeak.rewards.reward_set import as_reward, build_reward
from flatpeak.rewards.workers.pool import WorkerPool
from flatpeak.tasks.reasoning_gym import ReasoningGymConfig, plain
from flatpeak.types import Completion, Group, Prompt
from support.cpu_time import cpu_time

factory = pytest.importorskip("reasoning_gym.factory")
REWARD = ReasoningGymReward()


def example(dataset, **arguments):
    return ReasoningGymConfig(dataset=dataset, size=1, test_size=1, arguments=arguments).load().train[0]


def answered(text):
    return Completion(token_ids=(0,), logprobs=(0.0,), finish_reason="stop", text=text)


def prompt_of(example, text="Solve."):
    return Prompt(id=example.id, token_ids=(0,), text=text, example=example)


def score(example, answer):
    return REWARD(answered(f"<answer>{answer}</answer>"), prompt_of(example))


def group_of(example, *texts):
    return Group(prompt=prompt_of(example), completions=tuple(map(answered, texts)))


@pytest.mark.slow
def test_every_data_set_gives_its_own_answer_full_marks():
    names = sorted(set(factory.DATASETS) - {"composite"})
    assert len(names) >= 105
    result = {name: example(name) for name in names}
    scores = {name: score(row, row.gold) for name, row in result.items() if row.gold}
    assert len(scores) >= 100
    assert {name: value for name, value in scores.items() if value != 1.0} == {}


def test_a_wrong_answer_has_what_the_data_set_gives_it():
    row = example("chain_sum")
    assert score(row, int(row.gold) + 1) == 0.0
    assert score(row, f" {row.gold}\n") == 1.0
    factors = example("prime_factorization")
    assert score(factors, "1 × " + factors.gold) == 0.5


def test_only_the_last_answer_block_after_the_thinking_counts():
    row = example("chain_sum")
    prompt = prompt_of(row)
    assert REWARD(answered(row.gold), prompt) == 0.0
    assert REWARD(answered(f"<think><answer>{row.gold}</answer>"), prompt) == 0.0
    assert REWARD(answered(f"<answer>no</answer><answer>{row.gold}</answer>"), prompt) == 1.0
    assert REWARD(answered("<answer> </answer>"), prompt) == 0.0
    prefilled = prompt_of(row, text="Solve. <think>")
    assert REWARD(answered(f"so</think><answer>{row.gold}</answer>"), prefilled) == 1.0


def test_the_whole_text_can_be_the_answer():
    row = example("chain_sum")
    reward = ReasoningGymReward(extraction="whole")
    assert reward(answered(f"<think>hm</think>\n{row.gold}\n"), prompt_of(row)) == 1.0
    assert reward.answer(answered(f" {row.gold} "), prompt_of(row)) == row.gold


def test_votes_count_the_stripped_answer():
    row = example("chain_sum")
    assert REWARD.answer(answered("<answer> 5\n</answer>"), prompt_of(row)) == "5"
    assert REWARD.answer(answered("5"), prompt_of(row)) is None


def test_arguments_travel_to_the_scorer():
    row = example("number_sorting", min_numbers=3, max_numbers=3)
    stored = json.loads(row.columns["reasoning_gym"])
    assert restore(stored["arguments"]) == {"min_numbers": 3, "max_numbers": 3}
    assert score(row, row.gold) == 1.0


@pytest.mark.parametrize("value", [(1, [2, (3,)]), {1: {"a": (2,)}}, {1, 2}, frozenset("ab"), [], {}, "x", None, 1.5])
def test_stored_values_come_back_as_they_were(value):
    back = restore(json.loads(json.dumps(plain(value))))
    assert back == value
    assert type(back) is type(value)


def test_scorers_that_run_the_answer_as_python_are_all_guarded():
    alive = {
        name
        for name, (dataset, _) in factory.DATASETS.items()
        if re.search(r"\b(eval|exec|parse_expr|sympify)\((?!entry|metadata)", inspect.getsource(dataset.score_answer))
    }
    # Its parser is its own.
    assert alive - {"propositional_logic"} == EVALUATED | PARSED | ARITHMETIC


@pytest.mark.parametrize("name", sorted(EVALUATED | PARSED | ARITHMETIC))
def test_no_answer_is_executed(name, tmp_path):
    row = example(name)
    for program in (
        "__import__('pathlib').Path(r'{0}').touch()",
        "[c for c in ().__class__.__base__.__subclasses__()] and open(r'{0}', 'w')",
        "[open(r'{0}', 'w')]",
        "(lambda: open(r'{0}', 'w'))()",
    ):
        canary = tmp_path / "canary"
        assert score(row, program.format(canary)) == 0.0
        assert not canary.exists()


@pytest.mark.parametrize("name", sorted(EVALUATED | PARSED | ARITHMETIC))
@pytest.mark.parametrize(
    "answer",
    [
        "99**99**99",
        "9**9**9**9",
        "[0]*10**9",
        "(" * 900 + "1" + ")" * 900,
        "-" * 1999 + "1",
        "x**(10**9)",
        "((9**99)**99)**99",
    ],
)
def test_a_hostile_answer_costs_a_run_scorer_nothing(name, answer):
    row = example(name)
    with cpu_time() as spent:
        assert score(row, answer) == 0.0
    assert spent.seconds < 1


@pytest.mark.parametrize(
    ("name", "answer", "allowed"),
    [
        ("spiral_matrix", "[1, 2, 3]", True),
        ("spiral_matrix", "1 2 3", True),
        ("spiral_matrix", "range(3)", False),
        ("spiral_matrix", "[" + "1, " * MAX_PROGRAM + "]", False),
        ("simple_integration", "x**2/2 + C", True),
        ("simple_integration", "-3*x**11/11 + 2.5*x**(1/2) - C", True),
        ("intermediate_integration", "exp(2*x)*sin(3*x)/13 + log(x + 1)", True),
        ("intermediate_integration", "(x + 1)**7/7", True),
        ("intermediate_integration", "(x + 1)**40", False),
        ("intermediate_integration", "factorial(999)", False),
        ("intermediate_integration", "x.free_symbols", False),
        ("intermediate_integration", "sin(cos(tan(exp(x))))", False),
        ("intermediate_integration", "10**101", False),
        ("intermediate_integration", "2 x", False),
        ("countdown", "(1 + 2) * 3", True),
        ("countdown", "2**3", False),
        ("complex_arithmetic", "-3.5 + 2.0j", True),
        ("complex_arithmetic", "nan", False),
        ("game_of_life_halting", "False", True),
        ("game_of_life_halting", "maybe", False),
        ("chain_sum", "anything at all", True),
    ],
)
def test_which_answers_reach_a_scorer(name, answer, allowed):
    assert admissible(name, answer, {"answer": "the row's own"}) is allowed


def test_the_rows_own_answer_always_reaches_the_scorer():
    assert admissible("string_insertion", "ABCDE", {"answer": "ABCDE"})
    assert not admissible("string_insertion", "ABCDE", {"answer": "ABCD"})


def test_not_a_number_is_no_right_answer():
    assert score(example("complex_arithmetic"), "nan") == 0.0


def test_an_answer_that_a_scorer_cannot_read_scores_zero():
    assert score(example("prime_factorization"), "two times three") == 0.0
    assert score(example("boxnet"), "[1, 2]") == 0.0


def test_an_endless_answer_is_not_read():
    row = example("chain_sum")
    assert score(row, row.gold + " " * MAX_CHARACTERS) == 1.0
    assert score(row, row.gold + "." * MAX_CHARACTERS) == 0.0


def broken(row):
    stored = json.loads(row.columns["reasoning_gym"])
    stored["entry"] = ["dict", ["tuple", "answer", "two times three"]]
    return type(row)(id="broken", question="?", gold="", columns={"reasoning_gym": json.dumps(stored)})


def test_a_scorer_that_fails_on_the_rows_own_answer_makes_scores_missing_and_not_zero():
    row = example("prime_factorization")
    scored = REWARD.score(
        [group_of(broken(row), "<answer>a</answer>", "a"), group_of(row, f"<answer>{row.gold}</answer>")]
    )
    assert scored.scores == [[None, 0.0], [1.0]]
    assert scored.failed == 1
    assert isinstance(scored.first_error, ValueError)


def test_a_row_of_another_task_is_named(prompt, completion):
    with pytest.raises(UserError, match=r"row 'row-1': the reward reasoning_gym needs the column `reasoning_gym`"):
        REWARD(completion("<answer>1</answer>"), prompt())


def test_a_recipe_builds_it_and_workers_give_the_same_scores():
    config = {"gym": ReasoningGymRewardConfig(weight=2.0)}
    row = example("chain_sum")
    group = group_of(row, f"<answer>{row.gold}</answer>", "<answer>x</answer>", "none")
    here = build_reward(config)([group])
    assert here.total == [[2.0, 0.0, 0.0]]
    assert build_reward(config).answer("gym", group.completions[1], group.prompt) == "x"
    with WorkerPool(1, timeout=60) as workers:
        assert build_reward(config, workers=workers)([group]) == here


def test_from_python_it_is_graded_as_in_a_recipe():
    row = example("chain_sum")
    group = group_of(row, f"<answer>{row.gold}</answer>", "<answer>x</answer>")
    assert as_reward({"gym": (REWARD, 2.0)})([group]).total == [[2.0, 0.0]]
    rewards = as_reward(REWARD)
    assert rewards([group]).total == [[1.0, 0.0]]
    assert [scorer.isolation.timeout for scorer in rewards._scorers.values()] == [5.0]


def test_what_unpickles_it_has_loaded_the_package_before_the_clock_starts():
    code = (
        "import pickle, sys\n"
        "assert 'reasoning_gym' not in sys.modules\n"
        f"reward = pickle.loads({pickle.dumps(REWARD)!r})\n"
        "assert 'reasoning_gym' in sys.modules\n"
        "assert 'torch' not in sys.modules\n"
        "print(reward.extraction)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("answer_tag\n", "")


@pytest.mark.slow
def test_an_answer_that_its_scorer_works_on_without_end_is_wrong_and_harms_no_other():
    endless = "*".join(f"(x + {number})**12" for number in range(60))
    row, other = example("intermediate_integration"), example("chain_sum")
    groups = [
        group_of(row, f"<answer>{endless}</answer>", f"<answer>{row.gold}</answer>"),
        group_of(other, f"<answer>{other.gold}</answer>"),
    ]
    start = time.perf_counter()
    with WorkerPool(2, timeout=30) as workers:
        rewards = build_reward({"gym": ReasoningGymRewardConfig(timeout=1.5)}, workers=workers)
        scores = rewards(groups)
        assert scores.total == [[0.0, 1.0], [1.0]]
        assert scores.timed_out == {"gym": [[True, False], [False]]}
        assert rewards.failures == {}
    assert time.perf_counter() - start < 60


def test_it_pickles():
    assert pickle.loads(pickle.dumps(ReasoningGymReward(extraction="whole"))) == ReasoningGymReward(extraction="whole")
