import json
import random
import sys
from types import ModuleType

import pytest

from flatpeak.rewards.multiple_choice import official_letter
from flatpeak.tasks.config import build_task
from flatpeak.tasks.mmlu import PRO_CATEGORIES as CATEGORIES
from flatpeak.tasks.mmlu import MMLUProConfig
from flatpeak.tasks.prompts import PromptConfig, build_prompts
from support.models import run_model

CUE = "Answer: Let's think step by step."


def row(id, category, options, answer, *, worked=""):
    return {
        "question_id": id,
        "question": f"Question {id}?",
        "options": options,
        "answer": answer,
        "answer_index": "ABCDEFGHIJ".index(answer),
        "cot_content": worked,
        "category": category,
        "src": "own",
    }


def validation():
    return [
        row(
            10 * c + i,
            category,
            [f"o{n}" for n in range(10)],
            "ABCDE"[i],
            worked=f"A: Let's think step by step. Because of {i}. The answer is ({'ABCDE'[i]}).",
        )
        for c, category in enumerate(("law", "math"))
        for i in range(5)
    ]


TEST = [
    row(900, "math", [f"t{n}" for n in range(10)], "J"),
    row(901, "law", ["yes", "no", "N/A", "N/A", "N/A"], "B"),
    row(902, "law", ["N/A", "yes", "no"], "C"),
]


@pytest.fixture
def folder(tmp_path):
    for split, rows in (("validation", validation()), ("test", TEST)):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def build(folder, **settings):
    return build_task(MMLUProConfig(path=str(folder), **settings))


def by_id(examples):
    return {example.id: example for example in examples}


def test_a_test_question_follows_five_worked_examples_of_its_category_in_the_official_strings(folder):
    task = build(folder)
    assert (task.name, len(task.train), len(task.test)) == ("mmlu_pro", 10, 3)
    example = by_id(task.test)["test/900"]
    assert example.preamble == (
        "The following are multiple choice questions (with answers) about math. Think step by step and then finish "
        'your answer with "the answer is (X)" where X is the correct letter choice.\n\n\n\n'
    )
    options = "\n".join(f"{letter}. o{n}" for n, letter in enumerate("ABCDEFGHIJ"))
    assert len(example.shots) == 5
    assert example.shots[2] == (
        f"Question:\nQuestion 12?\nOptions:\n{options}\n{CUE} Because of 2. The answer is (C).\n\n"
    )
    assert example.question.startswith("Question:\nQuestion 900?\nOptions:\nA. t0\nB. t1\n")
    assert example.question.endswith(f"\nJ. t9\n{CUE}")
    assert (example.gold, example.rationale, example.subsets) == ("J", None, {"category": "math"})
    assert example.columns["src"] == "own"


FIVE = ("biology", "computer science", "law", "other", "psychology")


def odd_rows(category, base):
    """Five worked examples and a test question, with spaces and line breaks where published rows have them."""
    questions = ["Is it so?", " Leading space?", "Trailing space? ", "Two\nlines?", "A break at its end?\n"]
    endings = ["", "\n", " ", "\n\n", ""]
    options = ["first", " second", "N/A", "third ", "fourth\n"]
    shots = [
        row(base + i, category, options, "ABDEA"[i], worked=f"A: Let's think step by step. By {i}.{endings[i]}")
        | {"question": questions[i]}
        for i in range(5)
    ]
    return shots, row(base + 9, category, options, "D") | {"question": f"{category}:\n what? "}


def published_prompt(shots, asked):
    """By the rules of the published script (TIGER-AI-Lab/MMLU-Pro, commit f418b11), written down anew.

    The instruction is a file that ends in three line breaks, `{$}` in it is the category, and one more break follows.
    """
    category = asked["category"]
    text = f"The following are multiple choice questions (with answers) about {category}. Think step by step and then "
    text += 'finish your answer with "the answer is (X)" where X is the correct letter choice.' + "\n" * 3 + "\n"
    for one in [*shots, asked]:
        real = [option for option in one["options"] if option != "N/A"]
        lines = ["Question:", one["question"], "Options:", *(f"{'ABCDE'[n]}. {real[n]}" for n in range(len(real)))]
        text += "".join(f"{line}\n" for line in lines)
        text += f"{CUE}" if one is asked else one["cot_content"].replace(f"A: {CUE[8:]}", CUE) + "\n\n"
    return text


def test_the_prompts_of_five_categories_are_the_published_ones_byte_for_byte(tmp_path):
    rows = {category: odd_rows(category, 100 * index) for index, category in enumerate(FIVE)}
    for split, result in (
        ("validation", [one for shots, _ in rows.values() for one in shots]),
        ("test", [asked for _, asked in rows.values()]),
    ):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in result))
    _, tokenizer = run_model()
    prompts = build_prompts(build(tmp_path).test, tokenizer, PromptConfig(), max_tokens=10**6).prompts
    texts = {prompt.example.subsets["category"]: prompt.text.encode() for prompt in prompts}
    assert texts == {category: published_prompt(*result).encode() for category, result in rows.items()}
    assert texts["law"].count(b"choice.\n\n\n\nQuestion:\nIs it so?\nOptions:\nA. first\nB.  second\nC. third \n") == 1


def test_options_that_are_not_applicable_are_dropped_and_the_gold_letter_follows(folder):
    test = by_id(build(folder).test)
    assert test["test/901"].columns["options"] == ["yes", "no"]
    assert test["test/901"].gold == "B"
    assert test["test/901"].question.endswith(f"Options:\nA. yes\nB. no\n{CUE}")
    assert (test["test/902"].columns["options"], test["test/902"].gold) == (["yes", "no"], "B")


def test_a_training_question_is_never_among_its_own_worked_examples(folder):
    train = by_id(build(folder).train)
    example = train["validation/12"]
    assert [shot.splitlines()[1] for shot in example.shots] == [f"Question {n}?" for n in (10, 11, 13, 14)]
    assert all("Question 12?" not in shot for shot in example.shots)
    assert example.rationale == " Because of 2. The answer is (C)."
    # The target of SFT goes on where the prompt ends, and says the gold letter.
    assert official_letter(example.rationale) == example.gold
    assert [len(e.shots) for e in build(folder, shots=3).train] == [3] * 10


def test_plain_wording_has_neither_shots_nor_a_cue(folder):
    task = build(folder, wording="plain")
    example = by_id(task.test)["test/901"]
    assert example.question == "Question 901?\n\nA. yes\nB. no"
    assert (example.preamble, example.shots) == ("", ())
    assert by_id(task.train)["validation/0"].rationale == ("Let's think step by step. Because of 0. The answer is (A).")


def test_categories_limit_both_sides(folder):
    task = build(folder, categories=("law",))
    assert {e.subsets["category"] for e in (*task.train, *task.test)} == {"law"}
    assert (len(task.train), len(task.test)) == (5, 2)
    assert len(CATEGORIES) == 14


def test_the_hubs_parquet_files_are_read_in_the_order_of_their_shards(folder, tmp_path):
    from pyarrow import Table
    from pyarrow.parquet import write_table

    data = tmp_path / "snapshot" / "data"
    data.mkdir(parents=True)
    write_table(Table.from_pylist(validation()), data / "validation-00000-of-00001.parquet")
    write_table(Table.from_pylist(TEST[:1]), data / "test-00000-of-00002.parquet")
    write_table(Table.from_pylist(TEST[1:]), data / "test-00001-of-00002.parquet")
    assert build(tmp_path / "snapshot").test == build(folder).test


def test_without_a_path_the_splits_come_from_the_hub(monkeypatch):
    asked = []

    def load_dataset(name, config=None, *, split):
        asked.append((name, config, split))
        return validation() if split == "validation" else TEST

    hub = ModuleType("datasets")
    hub.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", hub)
    assert len(build_task(MMLUProConfig(test_size=2)).test) == 2
    assert asked == [("TIGER-Lab/MMLU-Pro", None, "validation"), ("TIGER-Lab/MMLU-Pro", None, "test")]


def test_nothing_of_the_task_depends_on_the_global_generator(folder):
    random.seed(1)
    first = build(folder)
    random.seed(2)
    assert build(folder).test == first.test


def test_questions_whose_right_option_has_two_letters_are_counted(folder):
    assert build_task(MMLUProConfig(path=str(folder))).notices == ()
    with (folder / "test.jsonl").open("a") as file:
        file.write(json.dumps(row(903, "law", ["yes", "no", "yes"], "A")) + "\n")
        file.write(json.dumps(row(904, "law", ["yes", "no", "no"], "A")) + "\n")
    assert build_task(MMLUProConfig(path=str(folder))).notices == (
        "questions with their right option under two letters, of which one counts: 1 of 15 (test/903)",
    )
