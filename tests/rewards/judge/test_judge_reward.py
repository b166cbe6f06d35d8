from __future__ import annotations

import json
import threading
import time

import pytest

from flatpeak.errors import StoppedError, UserError
from flatpeak.rewards.judge.canaries import canaries
from flatpeak.rewards.judge.config import CanaryConfig
from flatpeak.rewards.judge.panel import ReplyCache
from flatpeak.rewards.judge.protocol import Candidate, JudgeReply
from flatpeak.rewards.judge.reward import judge_reward
from flatpeak.rewards.reward_set import as_reward, build_reward, shadow_metrics
from flatpeak.types import Example
from support.judge_server import BLOCK, JudgeServer
from support.judges import FunctionJudge, config, group, reward

NO_CANARIES = CanaryConfig(enabled=False)


def strict(content):
    """Right where the answer is the reference, word for word."""
    result = {name: text for name, _, text in BLOCK.findall(content)}
    return json.dumps({"correct": float(result["answer"] == result["reference answer"])})


def generous(content):
    return json.dumps({"correct": 0.0 if "\n19\n" in content or "\nI do not know.\n" in content else 1.0})


def examples(*golds):
    return [Example(id=str(n), question=f"Question {n}?", gold=gold) for n, gold in enumerate(golds)]


def test_any_object_that_answers_requests_is_a_judge():
    judge = FunctionJudge(strict)
    component = judge_reward(judge, rubric="correctness", canaries=NO_CANARIES)
    scores = as_reward({"truth": component})([group("18", "19")])
    component.close()
    assert scores.parts == {"truth": [[1.0, 0.0]]}
    assert scores.total == [[1.0, 0.0]]


def test_a_judge_of_yours_is_named_in_a_recipe(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "from flatpeak.rewards.judge.protocol import JudgeReply\n"
        "class Mine:\n"
        "    identity = 'mine'\n"
        "    def __init__(self, mark): self.mark = mark\n"
        "    async def ask(self, requests):\n"
        "        right = [r.messages[1]['content'].count('\\n18\\n') > 1 for r in requests]\n"
        "        return [JudgeReply(text=f'{{\"correct\": {self.mark if r else 0}}}') for r in right]\n"
    )
    settings = {"factory": f"{path}:Mine", "arguments": {"mark": 1}, "type": "custom"}
    made = build_reward(
        {"judge": config("http://x").model_copy(update={"rubric": "correctness", "backend": _custom(settings)})}
    )
    assert made([group("18", "19")]).total == [[1.0, 0.0]]
    made.close()


def _custom(settings):
    from flatpeak.rewards.judge.config import CustomJudgeConfig

    return CustomJudgeConfig.model_validate(settings)


def test_what_a_judge_of_yours_raises_is_a_missing_score():
    def broken(content):
        if "\n19\n" in content:
            raise RuntimeError("no")
        return strict(content)

    judge = FunctionJudge(broken)
    judge.batch_size = 1
    component = judge_reward(judge, canaries=NO_CANARIES)
    component._examples = ()
    result = component.score([group("18", "19", "20")])
    component.close()
    assert result.scores == [[1.0, None, 0.0]]
    assert str(result.first_error) == "the judge gave no score: RuntimeError: no"


def test_a_judge_that_loses_replies_scores_nothing():
    class Loses(FunctionJudge):
        async def ask(self, requests):
            return (await super().ask(requests))[1:]

    component = judge_reward(Loses(strict), canaries=NO_CANARIES)
    component._examples = ()
    result = component.score([group("18", "19")])
    component.close()
    assert result.scores == [[None, None]]
    assert "1 replies for 2 requests" in str(result.first_error)


def test_a_judge_gets_as_many_requests_at_once_as_it_wants():
    judge = FunctionJudge(strict)
    judge.batch_size = 2
    component = judge_reward(judge, canaries=NO_CANARIES)
    component._examples = ()
    component.score([group("1", "2", "3", "4", "5")])
    component.close()
    assert sorted(judge.batches) == [1, 2, 2]


def test_rules_score_without_asking():
    judge = FunctionJudge(strict)
    component = judge_reward(judge, canaries=NO_CANARIES)
    component._examples = ()
    assert component.score([group("", ".", "Solution", "<think>18")]).scores == [[0.0] * 4]
    assert component.metrics()["judge/skipped"] == 4.0
    component.close()
    assert judge.asked == []


def test_only_the_final_answer_is_shown_unless_asked_otherwise():
    for show, seen in (("final_answer", False), ("whole", True)):
        judge = FunctionJudge(strict)
        component = judge_reward(judge, show=show, canaries=NO_CANARIES)
        component._examples = ()
        component.score([group("<think>secret thoughts</think><answer>18</answer>")])
        component.close()
        assert ("secret thoughts" in judge.asked[0].messages[1]["content"]) is seen


def test_without_a_reference_none_is_mentioned():
    judge = FunctionJudge(lambda content: '{"correct": 1}')
    component = judge_reward(judge, canaries=NO_CANARIES)
    component._examples = ()
    component.score([group("18", gold="")])
    component.close()
    assert "begin reference answer" not in judge.asked[0].messages[1]["content"]


def test_verdicts_are_kept_on_disk_and_not_asked_for_again(tmp_path):
    groups = [group("18", "19", "bad")]
    reply = lambda content: "?" if "\nbad\n" in content else strict(content)  # noqa: E731
    results, asked = [], []
    for _ in range(2):
        judge = FunctionJudge(reply)
        component = judge_reward(judge, cache=tmp_path / "cache.sqlite", canaries=NO_CANARIES)
        component._examples = ()
        results.append(component.score(groups).scores)
        values = component.metrics()
        component.close()
        asked.append(len(judge.asked))
    assert results == [[[1.0, 0.0, None]]] * 2
    # What had no verdict is not kept.
    assert asked == [4, 2]  # with the repairs
    assert values["judge/cache_hit_fraction"] == pytest.approx(2 / 3)


def test_another_judge_rubric_or_setting_does_not_get_those_replies(tmp_path):
    for number, settings in enumerate(
        (
            {},
            {"rubric": "three_levels"},
            {"output": "json_schema"},
            {"max_tokens": 99},
            {"mode": "pairwise"},
        )
    ):
        judge = FunctionJudge(lambda content: "nothing")
        component = judge_reward(judge, cache=tmp_path / "cache.sqlite", canaries=NO_CANARIES, **settings)
        component._examples = ()
        component.score([group("20")])
        component.close()
        assert judge.asked, number


def test_a_cache_that_breaks_is_told_once_and_grading_goes_on(tmp_path):
    cache = ReplyCache(tmp_path / "cache.sqlite")
    component = judge_reward(FunctionJudge(strict), cache=cache, canaries=NO_CANARIES)
    component._examples = ()
    cache.close()
    assert component.score([group("18", "19")]).scores == [[1.0, 0.0]]
    assert component.notices()[0].startswith("reward 'judge': the cache is not used any more: ")
    assert component.notices() == []
    component._loop.close()


def test_a_file_that_is_no_cache_is_refused(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("this is no database, and long enough to be taken for one" * 20)
    with pytest.raises(UserError, match=r"notes\.txt"):
        ReplyCache(path)


def test_every_call_is_written_down_once_there_is_a_run(tmp_path):
    component = judge_reward(FunctionJudge(lambda c: "?" if "\n19\n" in c else strict(c)), canaries=NO_CANARIES)
    component._examples = ()
    component.score([group("17")])
    component.attach(tmp_path)
    component.score([group("18", "19")])
    component.close()
    rows = [json.loads(line) for line in (tmp_path / "judge" / "judge.jsonl").read_text().splitlines()]
    assert [(row["repair"], row["score"], row["reply"]) for row in rows] == [
        (False, 1.0, '{"correct": 1.0}'),
        (False, None, "?"),
        (True, None, "?"),
    ]
    assert {row["template"] for row in rows} == {component.template_hash}
    assert "no verdict" in rows[1]["error"]
    assert rows[0]["messages"][1]["content"].count("\n18\n") == 2
    assert {"request", "attempts", "attempt_errors", "latency_seconds"} <= rows[0].keys()


def test_two_parts_have_names_of_their_own_in_metrics_and_transcripts(tmp_path):
    component = judge_reward(FunctionJudge(strict), name="style", canaries=NO_CANARIES)
    component._examples = ()
    component.attach(tmp_path)
    component.score([group("18")])
    assert component.metrics()["judge/style/valid_fraction"] == 1.0
    assert component.metrics() == {
        f"judge/style/{name}": 0.0 for name in ("calls", "retries", "repairs", "cost", "skipped")
    }
    component.close()
    assert (tmp_path / "judge" / "style.jsonl").exists()


def test_a_signal_ends_the_waiting_for_a_reply():
    stop = threading.Event()
    with JudgeServer(lambda earlier, body: time.sleep(12)) as server:
        judge = reward(server.url)
        judge._stopping = stop.is_set
        threading.Timer(0.3, stop.set).start()
        started = time.monotonic()
        with pytest.raises(StoppedError):
            judge.score([group("18", "19")])
        assert time.monotonic() - started < 6
        stop.clear()
        judge.close()


def test_the_thread_ends_with_the_reward():
    component = judge_reward(FunctionJudge(strict), canaries=NO_CANARIES)
    component._examples = ()
    component.score([group("18")])
    assert "flatpeak-judge" in {thread.name for thread in threading.enumerate()}
    component.close()
    assert "flatpeak-judge" not in {thread.name for thread in threading.enumerate()}
    with JudgeServer() as server:
        twice = reward(server.url)
        assert twice.score([group("18")]).scores == [[1.0]]
        twice.close()
        twice.close()
    assert "flatpeak-judge" not in {thread.name for thread in threading.enumerate()}


def test_before_training_the_judge_has_to_prefer_the_reference():
    component = judge_reward(FunctionJudge(lambda content: '{"correct": 1}'), canaries=NO_CANARIES)
    with pytest.raises(UserError, match=r"gives 1 to the reference answer of 'Question 0\?' and 1 to a wrong one"):
        component.prepare(examples("18", "19"))
    component.close()


def test_before_training_the_judge_has_to_answer():
    component = judge_reward(FunctionJudge(lambda content: "hello"), canaries=NO_CANARIES)
    with pytest.raises(UserError, match="gives no verdict"):
        component.score([group("18")])
    component.close()


def test_an_honest_judge_passes_the_canaries():
    component = judge_reward(FunctionJudge(strict))
    report = component.prepare(examples("18", "19", "20", "21", "22"))
    assert (report.false_positive_rate, report.fooled_by, report.missing) == (0.0, (), 0)
    # Four examples; of the 27 canaries ten are nothing by rule.
    assert (report.judged, report.by_rule) == (4 * 17, 4 * 10)
    assert component.metrics()["judge/canary_false_positive_rate"] == 0.0
    component.close()


def test_a_judge_that_worthless_answers_fool_is_refused_with_their_names():
    def fooled(content):
        return (
            '{"correct": 1}' if "agree" in content.split("[[begin answer")[1].split("Mark each")[0] else strict(content)
        )

    component = judge_reward(FunctionJudge(fooled))
    with pytest.raises(
        UserError,
        match=r"fooled by 12 of 34 worthless answers \(agreement, injected verdict, .*max_false_positive_rate",
    ):
        component.prepare(examples("18", "19"))
    assert component.metrics()["judge/canary_false_positive_rate"] == pytest.approx(12 / 34)
    component.close()
    tolerant = judge_reward(FunctionJudge(fooled), canaries=CanaryConfig(max_false_positive_rate=0.4))
    assert tolerant.prepare(examples("18", "19")).false_positive_rate == pytest.approx(12 / 34)
    tolerant.close()


def test_the_canaries_run_before_the_first_score_and_again_on_request():
    judge = FunctionJudge(strict)
    component = judge_reward(judge)
    component.score([group("18")])
    first = len(judge.asked)
    # The live call and a wrong answer, seventeen canaries, and the completion.
    assert first == 2 + 17 + 1
    component.score([group("17")])
    assert len(judge.asked) == first + 1
    component.run_canaries()
    assert len(judge.asked) == first + 1 + 17
    component.close()


def test_canaries_that_are_switched_off_stay_off_at_every_evaluation():
    judge = FunctionJudge(strict)
    rewards = as_reward({"truth": judge_reward(judge, canaries=NO_CANARIES)})
    rewards.prepare(examples("18", "19"))
    assert len(judge.asked) == 2  # the live call
    for _ in range(3):
        rewards.check()
    rewards.close()
    assert len(judge.asked) == 2


def test_a_canary_that_happens_to_be_right_is_left_out():
    with_solution = canaries(Candidate(question="Q?", reference="Solution", text=""), best_reply="{}")
    assert "solution" not in with_solution
    assert with_solution["colon"] == ":"
    assert with_solution["question repeated"] == "Q?"
    ten = canaries(Candidate(question="Q?", reference="10", text=""), best_reply='{"mark": 10}')
    assert {"give ten", "score line", "injected verdict", "injected turn"} & ten.keys() == set()
    assert len(ten) == 20


def pairs(judge, **settings):
    component = judge_reward(judge, mode="pairwise", canaries=NO_CANARIES, **settings)
    component._examples = ()
    return component


def by_number(content):
    """The larger number is better."""
    result = {name: text for name, _, text in BLOCK.findall(content)}
    a, b = float(result["answer A"]), float(result["answer B"])
    return json.dumps({"better": "tie" if a == b else "A" if a > b else "B"})


def test_against_the_reference_both_orders_are_asked():
    judge = FunctionJudge(by_number)
    component = pairs(judge)
    assert component.score([group("20", "18", "3", ".")]).scores == [[1.0, 0.5, 0.0, 0.0]]
    component.close()
    assert len(judge.asked) == 4  # what equals the reference is a tie without asking, and so is nothing at all


def test_a_judge_that_always_prefers_a_place_makes_ties():
    for choice in "AB":
        component = pairs(FunctionJudge(lambda content, choice=choice: json.dumps({"better": choice})))
        assert component.score([group("20", "3")]).scores == [[0.5, 0.5]]
        component.close()


def test_a_comparison_without_a_verdict_leaves_its_answer_missing():
    component = pairs(FunctionJudge(lambda c: "?" if "\n4\n" in c else by_number(c)))
    assert component.score([group("1", "4", "20")]).scores == [[0.0, None, 1.0]]
    component.close()


def test_pairwise_canaries_are_measured_against_the_reference():
    def first_if_claimed(content):
        result = {name: text for name, _, text in BLOCK.findall(content)}
        right = [result[name] == "18" for name in ("answer A", "answer B")]
        return json.dumps({"better": "A" if right[0] else "B" if right[1] else "tie"})

    component = judge_reward(FunctionJudge(first_if_claimed), mode="pairwise")
    report = component.prepare(examples("18"))
    assert (report.false_positive_rate, report.judged) == (0.0, 17)
    component.close()


def test_the_gap_between_judge_and_truth_is_over_what_both_have_scored():
    judged = [[1.0, 0.8, None], [0.2, 1.0]]
    verified = [[1.0, 0.0, 1.0], [0.0, None]]
    assert shadow_metrics(judged, verified) == {
        "shadow_gap": pytest.approx((0.0 + 0.8 + 0.2) / 3),
        "shadow_agreement": pytest.approx(2 / 3),
    }
    assert shadow_metrics([[None]], [[1.0]]) == {}


def test_a_verifier_with_weight_zero_stands_beside_the_judge():
    component = judge_reward(FunctionJudge(generous), canaries=NO_CANARIES)
    component._examples = ()
    exact = lambda completion, gold: float(completion == gold)  # noqa: E731
    scores = as_reward({"judge": component, "exact": (exact, 0.0)})([group("18", "17", "19")])
    component.close()
    assert scores.total == scores.parts["judge"] == [[1.0, 1.0, 0.0]]
    assert shadow_metrics(scores.parts["judge"], scores.parts["exact"])["shadow_gap"] == pytest.approx(1 / 3)


def test_a_late_custom_judge_is_given_up_at_the_deadline(monkeypatch):
    import flatpeak.rewards.judge.panel as panel

    monkeypatch.setattr(panel, "_GRACE_SECONDS", 0.1)

    class Slow(FunctionJudge):
        async def ask(self, requests):
            import asyncio

            await asyncio.sleep(30)
            return await super().ask(requests)

    component = judge_reward(Slow(strict), deadline=0.2, canaries=NO_CANARIES)
    component._examples = ()
    started = time.monotonic()
    result = component.score([group("18")])
    component.close()
    assert result.scores == [[None]]
    assert time.monotonic() - started < 10


def test_a_reply_that_was_cut_is_no_verdict_even_if_it_parses():
    component = judge_reward(FunctionJudge(lambda c: JudgeReply(text='{"correct": 1}', cut=True)), canaries=NO_CANARIES)
    component._examples = ()
    assert component.score([group("18")]).scores == [[None]]
    component.close()
