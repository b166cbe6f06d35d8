from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from flatpeak.episodes.calls import DEEPEST, plain_calls
from flatpeak.episodes.environments import LONGEST_ANSWER, EnvironmentHost, Session, make_environment
from flatpeak.episodes.tools import ParsedCall
from flatpeak.errors import UserError
from flatpeak.rewards.workers.pool import WorkerPool
from flatpeak.types import Completion, Example, Score, ToolCall

TOOLS = """
import os, sys, time

def divide(a: int, b: int):
    return a / b

def hang(seconds: float):
    time.sleep(seconds)

def leave():
    os._exit(3)

def quit():
    sys.exit("enough")

def much():
    return "x" * 10_000_000

def raw():
    return b"\\xff"

def nothing():
    pass

def hungry():
    raise MemoryError

def halves(text: str):
    raise ValueError("\\ud800" + text)
"""
CLASSES = '''
import os, random, threading

from flatpeak.episodes.environments import Step


class Note:
    def __init__(self, text):
        self.text = text


class Counter:
    """Counts."""

    LIMITS = {"top": 3}

    def reset(self, seed: int, question: str, level: int, unused: str = "none"):
        self.total = random.Random(seed).randrange(10**9)
        self.start = self.total
        self.notes = [Note(f"{question} {level} {unused}")]
        return f"from {self.start}"

    def add(self, number: int) -> int:
        """Add to the total.

        Args:
            number: What to add.
        """
        if number == 13:
            raise ValueError("unlucky")
        if number == 666:
            os._exit(1)
        self.total += number
        return self.total - self.start

    def read(self):
        return [note.text for note in self.notes]

    def stop(self):
        self.done = True

    def keep_lock(self):
        self.lock = threading.Lock()

    def reward(self, episode):
        if episode.text == "hang":
            while True:
                pass
        values = {"nan": float("nan"), "text": "1", "bool": True, "none": None}
        return values.get(episode.text, self.total - self.start)

    def _helper(self, x):
        pass


class Quiet:
    def look(self):
        return "dark"


class Drawn:
    def reset(self):
        return str(random.random())

    def look(self):
        pass

    def reward(self):
        return 0.25


class Guess:
    def reset(self, gold, **columns):
        self.gold = int(gold)
        self.seen = sorted(columns)
        return f"guess {self.seen}"

    def step(self, action):
        if action == "crash":
            raise RuntimeError("table\\nflipped")
        if action == "odd":
            return "only text"
        if action == "inf":
            return Step("", float("inf"))
        if int(action) == self.gold:
            return Step("right", 1.0, True)
        return "higher" if int(action) < self.gold else "lower", -0.25 if action != "0" else None, False


class Judged(Guess):
    def reward(self, episode):
        return len(episode.text) + self.gold / 10
'''
EXAMPLE = Example(id="row", question="How many?", gold="7", columns={"level": 2, "theme": "sea"})
EPISODE = Completion(token_ids=(1,), logprobs=(-0.5,), finish_reason="stop", text="over")


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(2, timeout=60) as pool:
        yield pool


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("user")
    (folder / "my_tools.py").write_text(TOOLS)
    (folder / "my_classes.py").write_text(CLASSES)
    return folder


@pytest.fixture
def tools(pool: WorkerPool, files: Path) -> EnvironmentHost:
    names = ("divide", "hang", "leave", "quit", "much", "raw", "nothing", "hungry", "halves")
    environment = make_environment([f"{files / 'my_tools.py'}:{name}" for name in names])
    assert [schema["function"]["name"] for schema in environment.schemas] == list(names)
    assert (environment.is_game, environment.rewards) == (False, False)
    return EnvironmentHost(environment, pool, call_timeout=30)


def make_host(pool: WorkerPool, files: Path, name: str, *, call_timeout: float = 30) -> EnvironmentHost:
    environment = make_environment(environment=f"{files / 'my_classes.py'}:{name}")
    return EnvironmentHost(environment, pool, call_timeout=call_timeout)


def call(name: str, **arguments: Any) -> ParsedCall:
    return ParsedCall(name=name, arguments=arguments)


def answers(host: EnvironmentHost, session: Session, *calls: ParsedCall) -> tuple[Session, list[str]]:
    session, made = host.answer(session, calls).result()
    return session, [one.answer for one in made]


def score(host: EnvironmentHost, session: Session, text: str = "over") -> Score:
    episode = Completion(token_ids=(1,), logprobs=(-0.5,), finish_reason="stop", text=text)
    return host.finish(session, episode).result()


def test_each_failure_of_a_function_is_an_answer_to_its_call(tools: EnvironmentHost) -> None:
    session, text = tools.start(EXAMPLE, seed=0).result()
    assert (session, text) == (Session(), None)
    expected = [
        (call("divide", a=1, b=0), "error: ZeroDivisionError: division by zero", "raised"),
        (call("leave"), "error: the call crashed", "died"),
        (call("quit"), "error: SystemExit: enough", "raised"),
        (call("hungry"), "error: the call ran out of memory", "memory"),
        (call("much"), "x" * LONGEST_ANSWER, None),
        (call("raw"), "\ufffd", None),
        (call("nothing"), "", None),
        (call("halves", text="b\ud800"), "error: ValueError: ?b?", "raised"),
        (
            call("divid", a=1),
            "error: there is no tool 'divid', did you mean 'divide'?; the tools are: divide, hang, leave, quit, much, "
            "raw, nothing, hungry, halves",
            "unknown_tool",
        ),
        (call("divide", a=1), "error: divide needs the argument 'b'", "bad_arguments"),
        (ParsedCall(name="", error="not \ud800 JSON"), "error: not ? JSON", "malformed"),
        (call("divide", a=1, b=2), "0.5", None),
    ]
    session, made = tools.answer(session, [one for one, _, _ in expected]).result()
    assert session == Session()
    assert made == tuple(
        ToolCall(name=one.name, arguments=one.arguments, answer=answer, failure=failure)
        for one, answer, failure in expected
    )
    assert tools.finish(session, EPISODE).result() is None
    assert tools.first_failure is None


def test_a_function_that_hangs_costs_one_call(tools: EnvironmentHost, pool: WorkerPool) -> None:
    host = EnvironmentHost(tools.environment, pool, call_timeout=0.5)
    session, (made,) = host.answer(Session(), [call("hang", seconds=100)]).result()
    assert (made.answer, made.failure) == ("error: the call took too long and was ended", "timeout")
    assert answers(tools, session, call("hang", seconds=0.0))[1] == [""]


def test_a_turn_may_have_many_calls_or_none(tools: EnvironmentHost) -> None:
    calls = [call("divide", a=number, b=1) for number in range(50)]
    assert answers(tools, Session(), *calls) == (Session(), [f"{number}.0" for number in range(50)])
    assert answers(tools, Session()) == (Session(), [])


def test_the_most_deeply_nested_arguments_that_are_read_reach_a_worker_and_the_log(
    pool: WorkerPool, tmp_path: Path
) -> None:
    file = tmp_path / "deep.py"
    file.write_text("def take(x: list):\n    return len(x)\n")
    host = EnvironmentHost(make_environment([f"{file}:take"]), pool, call_timeout=30)
    (read,) = plain_calls(f"<call>take(x={'[' * (DEEPEST - 1)}{']' * (DEEPEST - 1)})</call>")
    (deeper,) = plain_calls(f"<call>take(x={'[' * 2 * DEEPEST}{']' * 2 * DEEPEST})</call>")
    assert (read.error, str(deeper.error)[:27]) == (None, "The call could not be read.")
    _, (made,) = host.answer(Session(), [read]).result()
    assert (made.answer, asdict(made)["arguments"]) == ("1", dict(read.arguments))


def test_episodes_of_one_class_do_not_share_state(pool: WorkerPool, files: Path) -> None:
    host = make_host(pool, files, "Counter")
    assert [tool.name for tool in host.environment.tools] == ["add", "keep_lock", "read", "stop"]
    assert host.environment.schemas[0]["function"]["description"] == "Add to the total."
    assert (host.environment.is_game, host.environment.rewards) == (False, True)
    (first, text), (second, same), (other, different) = (host.start(EXAMPLE, seed=seed).result() for seed in (5, 5, 6))
    assert first == second != other
    assert text == same != different
    first, said = answers(
        host, first, call("add", number=2), call("add"), call("add", number=13), call("add", number=3)
    )
    assert said == ["2", "error: add needs the argument 'number'", "error: ValueError: unlucky", "5"]
    assert answers(host, second, call("add", number=1), call("read"))[1] == ["1", '["How many? 2 none"]']
    assert (score(host, first), score(host, second), score(host, other)) == (5.0, 0.0, 0.0)


def test_an_environment_may_end_the_episode(pool: WorkerPool, files: Path) -> None:
    host = make_host(pool, files, "Counter")
    session, _ = host.start(EXAMPLE, seed=5).result()
    assert not session.done
    session, said = answers(host, session, call("add", number=2), call("stop"))
    assert (session.done, session.failed, said) == (True, None, ["2", ""])
    assert score(host, session) == 2.0


def test_a_lost_environment_fails_and_has_no_reward(pool: WorkerPool, files: Path) -> None:
    host = make_host(pool, files, "Counter")
    session, _ = host.start(EXAMPLE, seed=5).result()
    lost, made = host.answer(session, [call("read"), call("ad"), call("add", number=666)]).result()
    assert lost.failed == "read, add of environment 'Counter': a worker process died: exit code 1"
    assert [one.failure for one in made] == ["died", "unknown_tool", "died"]
    assert score(host, lost) is None
    assert host.first_failure == lost.failed
    assert answers(host, session, call("add", number=1))[1] == ["1"]


def test_a_state_that_does_not_pickle_fails_with_the_fix(pool: WorkerPool, files: Path) -> None:
    host = make_host(pool, files, "Counter")
    session, _ = host.start(EXAMPLE, seed=5).result()
    lost, _ = answers(host, session, call("keep_lock"))
    assert lost.failed == (
        "keep_lock of environment 'Counter': its state cannot be pickled: TypeError: cannot pickle '_thread.lock' "
        "object; keep only values that pickle in its attributes, or leave the others out in __getstate__"
    )


@pytest.mark.parametrize(
    ("text", "reward", "failure"),
    [
        ("over", 0.0, None),
        ("bool", 1.0, None),
        ("none", None, None),
        ("nan", None, "the reward is float nan: give a finite number, or None"),
        ("text", None, "the reward is str '1': give a finite number, or None"),
        ("hang", None, "no answer from a worker process within 0.5 s"),
    ],
)
def test_a_reward_is_a_finite_number_or_missing(
    pool: WorkerPool, files: Path, text: str, reward: Score, failure: str | None
) -> None:
    host = make_host(pool, files, "Counter", call_timeout=0.5 if text == "hang" else 30)
    session, _ = make_host(pool, files, "Counter").start(EXAMPLE, seed=5).result()
    assert score(host, session, text) == reward
    assert host.first_failure == (failure and f"reward of environment 'Counter': {failure}")


def test_reset_and_reward_are_optional(pool: WorkerPool, files: Path) -> None:
    host = make_host(pool, files, "Quiet")
    session, text = host.start(EXAMPLE, seed=0).result()
    assert text is None
    assert not host.environment.rewards
    assert answers(host, session, call("look"))[1] == ["dark"]
    assert score(host, session) is None


def test_equal_seeds_give_equal_starts_without_a_generator_of_its_own(pool: WorkerPool, files: Path) -> None:
    host = make_host(pool, files, "Drawn")
    starts = [host.start(EXAMPLE, seed=seed).result() for seed in (1, 1, 2)]
    assert starts[0] == starts[1] != starts[2]
    assert score(host, starts[0][0]) == 0.25


def test_a_game_adds_up_the_rewards_of_its_steps(pool: WorkerPool, files: Path) -> None:
    host = make_host(pool, files, "Guess")
    assert (host.environment.is_game, host.environment.rewards, host.environment.schemas) == (True, True, [])
    session, text = host.start(EXAMPLE, seed=0).result()
    assert text == "guess ['level', 'question', 'seed', 'theme']"
    said: list[str] = []
    for action in ("0", "9", "3", "7"):
        assert not session.done
        assert score(host, session) == sum(session.rewards)
        session, observation = host.step(session, action).result()
        said.append(observation)
    assert said == ["higher", "lower", "higher", "right"]
    assert (session.rewards, session.done) == ((-0.25, -0.25, 1.0), True)
    assert score(host, session) == 0.5


def test_the_reward_of_a_whole_game_replaces_those_of_its_steps(pool: WorkerPool, files: Path) -> None:
    host = make_host(pool, files, "Judged")
    session, _ = host.start(EXAMPLE, seed=0).result()
    assert score(host, session, "cut") == 3.7  # also of a game that a limit ends before its first step
    session, _ = host.step(session, "7").result()
    assert session.rewards == (1.0,)
    assert score(host, session) == 4.7


@pytest.mark.parametrize(
    ("action", "failure"),
    [
        ("crash", "RuntimeError: table flipped ("),
        ("odd", "returned str 'only text': return Step(observation, reward, done)"),
        ("inf", "the reward is float inf: give a finite number, or None"),
    ],
)
def test_a_game_that_raises_fails(pool: WorkerPool, files: Path, action: str, failure: str) -> None:
    host = make_host(pool, files, "Guess")
    session, _ = host.start(EXAMPLE, seed=0).result()
    session, _ = host.step(session, "9").result()
    lost, observation = host.step(session, action).result()
    assert observation == ""
    assert str(lost.failed).startswith(f"step of environment 'Guess': {failure}")
    assert score(host, lost) is None


def test_a_row_without_the_column_that_reset_needs_is_refused(pool: WorkerPool, files: Path) -> None:
    host = make_host(pool, files, "Counter")
    with pytest.raises(UserError, match=r"has a parameter 'level', but row 'bare' has no such column: rename it"):
        host.start(Example(id="bare", question="?", gold=""), seed=0)


def test_a_class_that_no_worker_can_load_is_a_user_error(pool: WorkerPool, tmp_path: Path) -> None:
    file = tmp_path / "vanishing.py"
    file.write_text("class Gone:\n    def look(self):\n        pass\n")
    host = EnvironmentHost(make_environment(environment=f"{file}:Gone"), pool, call_timeout=30)
    file.unlink()
    with pytest.raises(UserError, match=r"cannot be loaded in a worker process: UserError: there is no file"):
        host.start(EXAMPLE, seed=0).result()


def test_many_episodes_wait_at_once(pool: WorkerPool, files: Path) -> None:
    host = make_host(pool, files, "Guess")
    starts = [host.start(EXAMPLE, seed=seed) for seed in range(20)]
    steps = [host.step(start.result()[0], "7") for start in starts]
    assert {step.result()[1] for step in steps} == {"right"}
