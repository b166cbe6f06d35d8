"""`flatpeak chat` asks a run's model as its training did."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from flatpeak.apps import chat
from flatpeak.apps.chat import Console, chat_loop
from flatpeak.config.load import parse_config
from flatpeak.errors import UserError
from flatpeak.pipeline import answering
from flatpeak.runs.checkpoints import write_checkpoint
from flatpeak.types import Completion, Prompt, SamplingParams
from support.episodes import END, TOKENIZER, Scripted, ids
from support.models import run_model, tiny_model
from support.runs import tiny_recipe

CHAT_TEMPLATE = (
    "{% if short %}!{% endif %}{% for m in messages %}{{ m.role[0] }}:{{ m.content }}/{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


class Session:
    """Somebody who asks these questions, and what is shown to them."""

    def __init__(self, *questions: str) -> None:
        left = iter([*questions, ""])
        self.answers: list[str] = []
        self.notes: list[str] = []
        self.console = Console(read=lambda prompt: next(left), write=self.answers.append, note=self.notes.append)


class Asked:
    """Stands in for the model: every prompt and how its answer was to be drawn."""

    def __init__(self) -> None:
        self.prompts: list[Prompt] = []
        self.sampling: list[SamplingParams] = []

    def __call__(self, model: Any, prompt: Prompt, *, sampling: SamplingParams, seed: int) -> Completion:
        self.prompts.append(prompt)
        self.sampling.append(sampling)
        number = len(self.prompts)
        return Completion(token_ids=(3,), logprobs=(0.0,), finish_reason="stop", text=f"={number}")

    @property
    def texts(self) -> list[str]:
        return [prompt.text for prompt in self.prompts]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    result = Asked()
    monkeypatch.setattr(chat, "reply", result)
    return result


def save_checkpoint(parent: Path, *, chat_template: str | None = None, context: int = 64) -> Path:
    model, tokenizer = run_model(max_position_embeddings=context)
    tokenizer.chat_template = chat_template

    def save(directory: Path) -> None:
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)

    return write_checkpoint(parent, 0, save_model=save, tensors={}, state={})


@pytest.fixture
def make_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`make_run(name, chat_template=..., **sections)`: what a run leaves behind, without the run."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)

    def make(
        name: str = "x", *, chat_template: str | None = None, context: int = 64, sft: bool = False, **sections: Any
    ) -> Path:
        path = tmp_path / "runs" / name
        recipe = parse_config(tiny_recipe(tmp_path / "runs", **{"run": {"name": name}, **sections}))
        checkpoints = path / "checkpoints" / ("sft" if sft else "")
        saved = save_checkpoint(checkpoints, chat_template=chat_template, context=context)
        (checkpoints / ("last" if sft else "best")).symlink_to(saved.name)
        (path / "config.yaml").write_text(yaml.safe_dump(recipe.model_dump(mode="json")))
        (path / "manifest.json").write_text(json.dumps({"versions": {"flatpeak": "0"}}))
        return path

    return make


def log_prompt(run: Path, prompt: str) -> None:
    (run / "rollouts").mkdir()
    (run / "rollouts" / "step_000007.jsonl").write_text(json.dumps({"prompt": prompt}) + "\n{not read}\n")


def test_a_run_is_asked_by_its_template_and_stops_where_it_did(make_run: Any, asked: Asked, tmp_path: Path) -> None:
    template = tmp_path / "ask.txt"
    template.write_text("1*{question}-\n")
    run = make_run(prompt={"template": str(template)}, rollout={"stop": ["#"], "max_new_tokens": 5})
    session = Session("2+2=", "3+3=")
    chat_loop(str(run), console=session.console)
    assert asked.texts == ["1*2+2=-", "1*3+3=-"]
    assert asked.sampling[0] == SamplingParams(temperature=0.0, max_new_tokens=5, stop=("#",))
    assert session.answers == ["=1", "=2"]
    assert session.notes[0] == f"asked as in training: {template}, each question by itself"
    assert session.notes[1].startswith("temperature 0, at most 5 tokens")


def test_a_run_is_asked_with_the_stop_strings_of_its_evaluations(make_run: Any, asked: Asked) -> None:
    run = make_run(rollout={"stop": ["#"]}, evaluation={"stop": ["7"]})
    chat_loop(str(run), console=Session("2+2=").console)
    assert asked.sampling[0].stop == ("7",)


@pytest.mark.parametrize("place", ["checkpoints/step_000000", "checkpoints/best"])
def test_a_checkpoint_of_a_run_is_asked_as_the_run_was(make_run: Any, asked: Asked, place: str) -> None:
    run = make_run(prompt={"template": "r1_zero"}, context=1024)
    session = Session("2+2=")
    chat_loop(str(run / place), console=session.console)
    assert asked.texts[0].endswith("User: 2+2=\nAssistant: <think>")
    assert session.notes[0].startswith("asked as in training: r1_zero")


def test_the_best_of_sft_is_asked_as_its_run_was(make_run: Any, asked: Asked, tmp_path: Path) -> None:
    template = tmp_path / "t.txt"
    template.write_text("{question}#")
    chat_loop(str(make_run(sft=True, prompt={"template": str(template)})), console=Session("1").console)
    assert asked.texts == ["1#"]


def test_a_chat_template_is_filled_as_in_training_one_question_at_a_time(make_run: Any, asked: Asked) -> None:
    prompt = {"template": "chat", "system": "0", "chat_template_kwargs": {"short": True}}
    run = make_run(chat_template=CHAT_TEMPLATE, prompt=prompt)
    session = Session("1", "2")
    chat_loop(str(run), console=session.console)
    assert asked.texts == ["!s:0/u:1/a:", "!s:0/u:2/a:"]
    assert session.notes[0] == (
        "asked as in training: chat, each question by itself; --template chat for a conversation"
    )


def test_a_question_stands_among_the_words_of_the_users_message(make_run: Any, asked: Asked) -> None:
    run = str(make_run(chat_template=CHAT_TEMPLATE, prompt={"template": "chat", "user": "1*{question}="}))
    chat_loop(run, console=Session("2", "3").console)
    assert asked.texts == ["u:1*2=/a:", "u:1*3=/a:"]
    chat_loop(run, template="chat", console=Session("2", "3").console)
    assert asked.texts[2:] == ["u:1*2=/a:", "u:1*2=/a:=3/u:1*3=/a:"]
    assert asked.prompts[-1].messages == (
        {"role": "user", "content": "1*2="},
        {"role": "assistant", "content": "=3"},
        {"role": "user", "content": "1*3="},
    )


def test_words_that_only_the_task_puts_around_a_question_are_named(make_run: Any, asked: Asked) -> None:
    def opening(question: str) -> str:
        sources = [{"path": "a.jsonl", "question": "{Body} {Question}"}, {"path": "b.jsonl", "question": question}]
        session = Session()
        run = make_run(question[:1], task={"type": "rows", "train": sources})
        chat_loop(str(run), console=session.console)
        return session.notes[0]

    assert opening("Question") == "asked as in training: plain, each question by itself"
    assert opening("{q}\nAs JSON, {{}}.") == (
        "asked by plain, each question by itself; the task words its questions as '{q}\\nAs JSON, {{}}.': write so too"
    )


def test_a_template_that_is_asked_for_comes_first(make_run: Any, asked: Asked) -> None:
    run = make_run(chat_template=CHAT_TEMPLATE, rollout={"stop": ["#"]})
    session = Session("1", "2")
    chat_loop(str(run), template="chat", system="0", console=session.console)
    assert asked.texts == ["s:0/u:1/a:", "s:0/u:1/a:=1/u:2/a:"]
    assert asked.sampling[0].stop == ()
    assert session.notes[0] == "asked by --template chat, as a conversation; training asked by plain"


def test_a_run_says_that_its_model_has_a_chat_template_of_its_own(make_run: Any, asked: Asked) -> None:
    session = Session("1")
    chat_loop(str(make_run(chat_template=CHAT_TEMPLATE)), console=session.console)
    assert asked.texts == ["1"]
    assert session.notes[0].endswith("plain, each question by itself; --template chat for the model's own")


def plain_model(directory: Path, *, chat_template: str | None) -> Path:
    model, tokenizer = run_model()
    tokenizer.chat_template = chat_template
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def test_a_plain_model_keeps_a_conversation_by_its_chat_template(tmp_path: Path, asked: Asked) -> None:
    session = Session("1", "2")
    chat_loop(str(plain_model(tmp_path / "m", chat_template=CHAT_TEMPLATE)), system="0", console=session.console)
    assert asked.texts == ["s:0/u:1/a:", "s:0/u:1/a:=1/u:2/a:"]
    # 64 positions less the 10 characters of the prompt.
    assert asked.sampling[0] == SamplingParams(temperature=1.0, max_new_tokens=64 - len("s:0/u:1/a:"))
    assert session.notes == [
        "asked by its chat template, as a conversation",
        "temperature 1, at most 256 tokens (see --help)",
    ]


def test_a_plain_model_without_a_chat_template_goes_on_from_the_text(tmp_path: Path, asked: Asked) -> None:
    path = str(plain_model(tmp_path / "m", chat_template=None))
    chat_loop(path, temperature=0.5, max_new_tokens=3, console=Session("1+1=").console)
    assert asked.texts == ["1+1="]
    assert asked.sampling == [SamplingParams(temperature=0.5, max_new_tokens=3)]
    with pytest.raises(UserError, match=r"--system: this model's tokenizer has no chat template"):
        chat_loop(path, system="0", console=Session().console)
    with pytest.raises(UserError, match=r"has no chat template: give --template plain, r1_zero or a file"):
        chat_loop(path, template="chat", console=Session().console)


def test_answers_are_drawn_as_in_the_runs_evaluations(make_run: Any, asked: Asked) -> None:
    evaluation = {
        "greedy": False, "samples": 2, "metric": "sampled/accuracy", "temperature": 0.7, "top_p": 0.9, "top_k": 5,
        "max_new_tokens": 7,
    }  # fmt: skip
    run = str(make_run(evaluation=evaluation))
    chat_loop(run, console=Session("1").console)
    chat_loop(run, temperature=0.2, console=Session("1").console)
    drawn = SamplingParams(temperature=0.7, top_p=0.9, top_k=5, max_new_tokens=7)
    assert asked.sampling[0] == drawn
    assert asked.sampling[1].temperature == 0.2


def test_an_example_question_comes_from_a_generated_task(make_run: Any, asked: Asked) -> None:
    session = Session()
    run = make_run()
    chat_loop(str(run), console=session.console)
    (example,) = (note for note in session.notes if note.startswith("try: "))
    task = parse_config(yaml.safe_load((run / "config.yaml").read_text())).task
    assert example == f"try: {task.load().test[0].question}"


GONE = {"type": "gsm8k", "path": "gone"}


@pytest.mark.parametrize(
    ("prompt", "shown"),
    [
        ("<2+2=>", "try: 2+2="),
        ("<2+2=\n3+3=>", None),  # not one line
        (f"<{'1' * 301}>", None),
        ("2+2=", None),  # of another template
    ],
)
def test_where_the_tasks_data_is_gone_the_example_is_one_that_was_logged(
    make_run: Any, asked: Asked, tmp_path: Path, prompt: str, shown: str | None
) -> None:
    (tmp_path / "t.txt").write_text("<{question}>")
    run = make_run(task=GONE, prompt={"template": str(tmp_path / "t.txt")})
    log_prompt(run, prompt)
    session = Session("1")
    chat_loop(str(run), console=session.console)
    assert [note for note in session.notes if note.startswith("try")] == ([] if shown is None else [shown])
    assert asked.texts == ["<1>"]


def test_worked_examples_that_a_task_would_add_are_mentioned(make_run: Any, asked: Asked) -> None:
    session = Session()
    chat_loop(str(make_run(task={**GONE, "shots": 8})), console=session.console)
    assert "without the 8 worked examples that the task puts before each question" in session.notes


def test_characters_without_a_token_are_named(make_run: Any, asked: Asked) -> None:
    session = Session("hello 1")
    chat_loop(str(make_run()), console=session.console)
    assert session.notes[-1] == "not in this model's vocabulary: 'h' 'e' 'l' 'o' ' '"
    assert len(asked.prompts) == 1


def test_a_question_of_which_the_model_sees_nothing_gets_no_answer(make_run: Any, asked: Asked) -> None:
    session = Session("hello")
    chat_loop(str(make_run()), console=session.console)
    assert session.notes[-2:] == [
        "not in this model's vocabulary: 'h' 'e' 'l' 'o'",
        "the model would see nothing of this question, and is not asked",
    ]
    assert asked.prompts == []


def test_a_checkpoint_that_was_moved_says_that_its_wording_is_unknown(
    make_run: Any, asked: Asked, tmp_path: Path
) -> None:
    (tmp_path / "t.txt").write_text("{question}#")
    run = make_run(prompt={"template": str(tmp_path / "t.txt")})
    moved = tmp_path / "elsewhere" / "model"
    shutil.copytree(run / "checkpoints" / "step_000000", moved)
    session = Session("1")
    chat_loop(str(moved), console=session.console)
    assert session.notes[:2] == [
        "this checkpoint lies outside its run, so how questions were worded in training is unknown; --recipe or "
        "--template can say it",
        "asked by plain, each question by itself",
    ]
    chat_loop(str(moved), recipe=str(run / "config.yaml"), console=Session("1").console)
    chat_loop(str(moved), template=str(tmp_path / "t.txt"), console=Session("1").console)
    assert asked.texts == ["1", "1#", "1#"]


def test_a_run_without_its_recipe_says_so_and_is_asked_like_any_model(make_run: Any, asked: Asked) -> None:
    run = make_run()
    (run / "config.yaml").unlink()
    session = Session("1+1=")
    chat_loop(str(run), console=session.console)
    assert session.notes[0].startswith(f"{run}/config.yaml is missing, so how questions were worded in training is unk")
    assert asked.texts == ["1+1="]
    assert asked.sampling[0].temperature == 1


def test_a_template_file_that_is_gone_is_an_error_with_a_way_out(make_run: Any, asked: Asked, tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("{question}#")
    run = make_run(prompt={"template": str(tmp_path / "t.txt")})
    (tmp_path / "t.txt").unlink()
    with pytest.raises(UserError, match=r"t\.txt: neither a file .*; start the chat in the directory .*--template"):
        chat_loop(str(run), console=Session().console)
    with pytest.raises(UserError, match=r"^--template r1-zero: neither a file .*did you mean 'r1_zero'"):
        chat_loop(str(run), template="r1-zero", console=Session().console)
    with pytest.raises(UserError, match=r"--system needs a chat template, and the questions are worded by plain"):
        chat_loop(str(run), template="plain", system="0", console=Session().console)
    chat_loop(str(run), template="plain", console=Session("1").console)
    assert asked.texts == ["1"]


def test_a_question_that_does_not_fit_is_refused_and_the_chat_goes_on(make_run: Any, asked: Asked) -> None:
    session = Session("1" * 64, "2")
    chat_loop(str(make_run()), console=session.console)
    assert asked.texts == ["2"]
    assert "the question has 64 tokens and the model's context 64: ask a shorter one" in session.notes


def test_a_long_conversation_loses_its_oldest_turns(tmp_path: Path, asked: Asked) -> None:
    session = Session("1" * 20, "2" * 20, "3" * 20)
    path = str(plain_model(tmp_path / "m", chat_template=CHAT_TEMPLATE))
    chat_loop(path, max_new_tokens=8, console=session.console)
    exchanges = [f"u:{'1' * 20}/a:=1/", f"u:{'2' * 20}/a:=2/", f"u:{'3' * 20}/"]
    # Two turns are 28 + 25 characters, and 8 of an answer fit beside them; three are too much.
    assert asked.texts == [
        exchanges[0][:23] + "a:",
        exchanges[0] + exchanges[1][:23] + "a:",
        exchanges[1] + exchanges[2] + "a:",
    ]
    assert session.notes[-1] == "the conversation's first 2 turns no longer fit into the model's context of 64"


def test_an_answer_that_was_cut_says_so(make_run: Any) -> None:
    session = Session("1+1=")
    chat_loop(str(make_run()), max_new_tokens=1, console=session.console)
    assert session.notes[-1] == "(cut after 1 token)"


def test_a_name_that_is_a_run_is_not_asked_of_the_hub(
    make_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run("gsm8k")
    make_run("sweep/01")
    monkeypatch.chdir(tmp_path)
    for name in ("gsm8k", "sweep/01"):
        with pytest.raises(UserError, match=rf"^{name} is no directory: did you mean runs/{name}\?$"):
            chat_loop(name, console=Session().console)
    with pytest.raises(UserError, match=r"^runs/gsm8: no such run or model directory: did you mean runs/gsm8k\?$"):
        chat_loop("runs/gsm8", console=Session().console)


def test_a_run_with_tools_calls_them_and_shows_the_calls(
    make_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(vocab_size=len(TOKENIZER), max_position_embeddings=200, eos_token_id=END)
    monkeypatch.setattr(sys.modules[__name__], "run_model", lambda **sizes: (model, TOKENIZER))
    turns = iter(["<call>add(a=2, b=3)</call>", "5"])
    inner = Scripted(lambda name, index: next(turns))
    monkeypatch.setattr(answering, "NativeEngine", lambda policy: inner)
    (tmp_path / "mine.py").write_text('def add(a: int, b: int) -> int:\n    """Add."""\n    return a + b\n')
    run = make_run(tools=[f"{tmp_path / 'mine.py'}:add"], prompt={"template": "plain"}, rollout={"max_new_tokens": 90})
    session = Session("2+3=")
    chat_loop(str(run), console=session.console)
    assert session.answers == ["5"]
    assert session.notes[-1] == "add(a=2, b=3) -> 5"
    assert inner.seen[0][0].text == "2+3="
    assert inner.seen[1][0].token_ids == ids("2+3=<call>add(a=2, b=3)</call><result>5</result>")


def test_a_limit_of_episodes_that_ends_an_answer_is_named(
    make_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(vocab_size=len(TOKENIZER), max_position_embeddings=200, eos_token_id=END)
    monkeypatch.setattr(sys.modules[__name__], "run_model", lambda **sizes: (model, TOKENIZER))
    monkeypatch.setattr(answering, "NativeEngine", lambda policy: Scripted(lambda *_: "<call>add(a=2, b=3)</call>"))
    (tmp_path / "mine.py").write_text('def add(a: int, b: int) -> int:\n    """Add."""\n    return a + b\n')
    sections = {"episodes": {"max_turns": 1}, "prompt": {"template": "plain"}, "rollout": {"max_new_tokens": 90}}
    session = Session("2+3=")
    chat_loop(str(make_run(tools=[f"{tmp_path / 'mine.py'}:add"], **sections)), console=session.console)
    assert session.notes[-1] == "(ended by episodes.max_turns)"
