"""Letters ranked by log-probability: the figures of published readers of MMLU."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from flatpeak.config.load import parse_config
from flatpeak.errors import StoppedError, UserError
from flatpeak.evaluation.choice_ranking import LetterRanker
from flatpeak.evaluation.config import EvaluationConfig
from flatpeak.evaluation.evaluate import PolicyEvaluator
from flatpeak.evaluation.result import Evaluation
from flatpeak.evaluation.tables import Comparison
from flatpeak.policy import model as policy_model
from flatpeak.policy.config import NewModelConfig, TokenizerConfig
from flatpeak.policy.loading import make_model
from flatpeak.policy.model import Policy
from flatpeak.rewards.reward_set import build_reward
from flatpeak.tasks.prompts import PromptConfig
from flatpeak.types import Example, Group, Prompt
from support.models import RUN_SIZES

WORDS = "Which of these is it? ABCDEFG. Answer: one two three four\n"


def make(kind: str, *, seed: int = 0) -> tuple[Any, Any]:
    tokenizer: dict[str, Any] = {"type": "characters"} if kind == "characters" else {"type": "bpe", "vocab_size": 300}
    config = NewModelConfig(
        architecture="qwen2",
        config={**RUN_SIZES, "max_position_embeddings": 256},
        tokenizer=TokenizerConfig(**tokenizer),
    )
    # Each letter after a space often enough for a token of its own.
    model, built = make_model(config, texts=[WORDS, " A B C D" * 50], seed=seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6)  # as they are made, all questions would have one most probable letter
    return model, built


def questions(tokenizer: Any, count: int = 7, *, options: int = 4, ending: str | None = None) -> list[Prompt]:
    result = []
    for index in range(count):
        words = WORDS.split()[index:]
        last = ("Answer:", "is it?", "three", "four", "these")[index % 5] if ending is None else ending
        text = "".join(f"{letter}. {word}\n" for letter, word in zip("ABCDEFG"[:options], words * 4, strict=False))
        example = Example(
            id=f"q{index}",
            question=text + last,
            gold="ABCD"[index % 4],
            columns={"options": ["one", "two", "three", "four", "five", "six", "seven"][:options]},
        )
        ids = tuple(tokenizer.encode(text + last, add_special_tokens=False))
        result.append(Prompt(id=example.id, token_ids=ids, text=text + last, example=example))
    return result


def expected(model: Any, tokenizer: Any, prompt: Prompt, letters: str, space: str = " ") -> list[float]:
    """transformers' own log-probabilities of the letter's tokens after the prompt, one plain forward pass each."""
    sums = []
    for letter in letters:
        ids = tokenizer.encode(prompt.text + space + letter, add_special_tokens=False)
        with torch.no_grad():
            logprobs = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
        sums.append(sum(float(logprobs[at - 1, ids[at]]) for at in range(len(prompt.token_ids), len(ids))))
    return sums


class NeverAsked:
    """A sampler that must not be asked."""

    def generate(self, prompts: Sequence[Prompt], **settings: Any) -> list[Group]:
        raise AssertionError("nothing is generated")


def reward(extraction: str = "letter") -> Any:
    recipe = {"model": {"path": "x"}, "rewards": {"correctness": {"type": "choice", "extraction": extraction}}}
    return build_reward(parse_config(recipe).rewards)


def run(policy: Policy, prompts: Sequence[Prompt], **settings: Any) -> Evaluation:
    evaluator = PolicyEvaluator(
        task="letters",
        prompts=prompts,
        sampler=settings.pop("sampler", NeverAsked()),
        reward=settings.pop("reward", reward()),
        config=EvaluationConfig(choices="rank", **settings),
        max_new_tokens=4,
        tokenizer=policy.tokenizer,
        prompt=PromptConfig(),
        longest_prompt=100,
        ranker=LetterRanker(policy=policy, tokenizer=policy.tokenizer, prompt_tokens=150),
    )
    return evaluator.evaluate()


@pytest.mark.parametrize("kind", ["characters", "bpe"])
@pytest.mark.parametrize("options", [4, 7])
def test_the_ranking_is_that_of_transformers_log_probabilities(kind: str, options: int) -> None:
    model, tokenizer = make(kind)
    letters = "ABCDEFG"[:options]
    prompts = questions(tokenizer, options=options)
    wanted = [expected(model, tokenizer, prompt, letters) for prompt in prompts]
    policy = Policy(model, tokenizer)
    ranked = LetterRanker(policy=policy, tokenizer=tokenizer, prompt_tokens=150)(prompts)
    for one, sums, prompt in zip(ranked, wanted, prompts, strict=True):
        assert list(one.logprobs) == list(letters)
        assert list(one.logprobs.values()) == pytest.approx(sums, rel=1e-4)
        assert one.letter == letters[sums.index(max(sums))]
        assert one.group.prompt is prompt
        (completion,) = one.group.completions
        assert (completion.text, completion.finish_reason) == (f" {one.letter}", "stop")
        assert sum(completion.logprobs) == pytest.approx(max(sums), rel=1e-4)
        assert tokenizer.decode(completion.token_ids) == f" {one.letter}"
    assert len({one.letter for one in ranked}) > 1


def test_a_model_without_flatpeaks_attention_ranks_by_its_own_log_probabilities(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, tokenizer = make("bpe")
    prompts = questions(tokenizer)
    native = LetterRanker(policy=Policy(model, tokenizer), tokenizer=tokenizer)(prompts)
    monkeypatch.setattr(policy_model, "unsupported", lambda model: "unproven")
    policy = Policy(*make("bpe"))
    assert not policy.native
    padded = LetterRanker(policy=policy, tokenizer=tokenizer)(prompts)
    assert [one.letter for one in padded] == [one.letter for one in native]
    for one, other in zip(padded, native, strict=True):
        assert list(one.logprobs.values()) == pytest.approx(list(other.logprobs.values()), rel=1e-4)


def test_a_signal_ends_the_ranking_between_two_passes() -> None:
    model, tokenizer = make("bpe")
    prompts, answers = questions(tokenizer, 8), iter([False, False, True])
    ranker = LetterRanker(
        policy=Policy(model, tokenizer), tokenizer=tokenizer, prompt_tokens=1, stopping=lambda: next(answers)
    )
    with pytest.raises(StoppedError):
        ranker(prompts)
    assert next(answers, None) is None  # asked before each pass, and no more


def test_after_a_line_break_the_letter_has_no_space() -> None:
    model, tokenizer = make("bpe")
    prompts = questions(tokenizer, 2, ending="Answer:\n")
    wanted = [expected(model, tokenizer, prompt, "ABCD", space="") for prompt in prompts]
    ranked = LetterRanker(policy=Policy(model, tokenizer), tokenizer=tokenizer)(prompts)
    for one, sums in zip(ranked, wanted, strict=True):
        assert list(one.logprobs.values()) == pytest.approx(sums, rel=1e-4)
        assert one.group.completions[0].text == one.letter


def test_figures_and_rows_are_of_the_most_probable_letters() -> None:
    model, tokenizer = make("bpe")
    prompts = questions(tokenizer)
    letters = [max(zip(expected(model, tokenizer, p, "ABCD"), "ABCD", strict=True))[1] for p in prompts]
    policy = Policy(model, tokenizer)
    result = run(policy, prompts)
    right = [float(letter == prompt.example.gold) for letter, prompt in zip(letters, prompts, strict=True)]
    assert result.values["accuracy"] == right
    assert [row["answer"] for row in result.rows] == letters
    assert [max(row["letter_logprobs"], key=row["letter_logprobs"].get) for row in result.rows] == letters
    assert (result.mean("extraction_failed"), result.mean("truncated"), result.mean("missing")) == (0, 0, 0)
    assert run(policy, prompts).rows == result.rows
    json.dumps(list(result.rows))


def test_tables_and_summaries_say_how_letters_were_found() -> None:
    model, tokenizer = make("bpe")
    result = run(Policy(model, tokenizer), questions(tokenizer))
    assert result.as_dict()["choices"] == "rank"
    text = Comparison(labels=["m"], evaluations=[result]).render()
    assert "letters, 7 questions, letters ranked by log-probability" in " ".join(text.split())


def test_a_question_without_options_and_a_reward_that_reads_no_letter_are_refused() -> None:
    model, tokenizer = make("bpe")
    policy, prompts = Policy(model, tokenizer), questions(tokenizer, 2)
    bare = Prompt(id="s", token_ids=(1,), text="3+4=", example=Example(id="s", question="3+4=", gold="7"))
    with pytest.raises(UserError, match=r"^evaluation\.choices=rank: question 's' has no lettered options; use a mult"):
        run(policy, [bare])

    class ReadsNothing:
        def __call__(self, groups: Sequence[Group]) -> Any:
            return reward()(groups)

        def answer(self, name: str, completion: Any, prompt: Any) -> str | None:
            return None

        def is_function(self, name: str) -> bool:
            return False

        def check(self) -> None:
            pass

    with pytest.raises(UserError, match=r"the reward correctness reads None where the answer is the letter [A-D]; set"):
        run(policy, prompts, reward=ReadsNothing())
    assert run(policy, prompts, reward=reward("robust")).rows[0]["answer"] in "ABCD"


def test_letters_that_the_tokenizer_does_not_know_are_refused() -> None:
    model, tokenizer = make_model(
        NewModelConfig(architecture="qwen2", config=RUN_SIZES), texts=["Answer: 12\n"], seed=0
    )
    with pytest.raises(UserError, match=r"writes several of the letters A, B, C, D alike"):
        LetterRanker(policy=Policy(model, tokenizer), tokenizer=tokenizer)(questions(tokenizer, 1))


def test_ranking_keeps_sampled_answers_beside_it() -> None:
    sampled = {"choices": "rank", "samples": 2, "max_new_tokens": 4}
    assert parse_config({"model": {"path": "x"}, "evaluation": sampled}).evaluation.choices == "rank"


def test_a_run_on_questions_without_options_is_refused_before_its_directory_is_made(
    recipe: Callable[..., Any], train: Callable[..., Any], tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"has no lettered options"):
        train(recipe(evaluation={"choices": "rank"}))
    assert not (tmp_path / "runs").exists()


def test_a_run_and_flatpeak_eval_rank_alike(
    recipe: Callable[..., Any], train: Callable[..., Any], tmp_path: Path
) -> None:
    from flatpeak.apps.compare import compare_checkpoints
    from flatpeak.runs.metrics import read_metrics
    from flatpeak.runs.summary import read_summary

    rows = [{"question": f"one {n}", "options": ["one", "two", "three"], "answer": "ABC"[n % 3]} for n in range(12)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = recipe(
        model={"new": {"config": {"max_position_embeddings": 128}}},
        rewards={"correctness": {"type": "choice", "extraction": "letter"}},
        evaluation={"choices": "rank", "every": 1},
    )
    config["task"] = {
        "type": "choices",
        "train": [{"path": str(tmp_path / "rows.jsonl"), "options": "options"}],
        "test_fraction": 0.5,
    }
    (tmp_path / "template.txt").write_text("{question}\nAnswer: ABC:")
    config["prompt"] = {"template": str(tmp_path / "template.txt")}
    result = train(config)
    summary = read_summary(result.path / "summary.json")
    assert [one.choices for one in summary.evaluations] == ["rank"] * len(summary.evaluations)
    during = [
        row["eval/choices/accuracy"] for row in read_metrics(result.path / "metrics.jsonl") if row["stage"] == "eval"
    ]
    assert len(during) == 3
    later = compare_checkpoints([str(result.path / "checkpoints" / "last")])
    assert later.evaluations[0].mean("accuracy") == during[-1]
    assert later.evaluations[0].choices == "rank"
