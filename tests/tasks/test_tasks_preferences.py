import json

import huggingface_hub
import pytest
from pydantic import TypeAdapter

from flatpeak.errors import UserError
from flatpeak.tasks import preferences
from flatpeak.tasks.config import TaskConfig, build_task
from flatpeak.tasks.preferences import PreferencePair, PreferencesConfig, conversation_text, load_preferences


def write(folder, rows, name="pairs.jsonl"):
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / name)


def alpaca(number, *, preference=1, **more):
    """A row of our own in AlpacaFarm's columns."""
    return {
        "instruction": f"Name {number} trees.",
        "input": "",
        "output_1": f"Oak {number}.",
        "output_2": f"Elm {number}.",
        "preference": preference,
        **more,
    }


def pair(number, **more):
    return {"prompt": f"Name {number} trees.", "chosen": f"Oak {number}.", "rejected": f"Elm {number}.", **more}


def load(tmp_path, rows, **settings):
    return load_preferences(PreferencesConfig(path=write(tmp_path, rows), **settings))


def only(tmp_path, row):
    """The one row read as the training side; another is held out."""
    path = write(tmp_path, [row])
    test = write(tmp_path, [pair(99)], "held_out.jsonl")
    loaded = load_preferences(PreferencesConfig(path=path, test_path=test))
    (read,) = loaded.train
    return read


def test_alpaca_farm_rows_become_pairs_by_their_label(tmp_path):
    first = only(tmp_path, alpaca(3))
    assert (first.id, first.prompt, first.chosen, first.rejected) == ("train/0", "Name 3 trees.", "Oak 3.", "Elm 3.")
    assert first.columns["preference"] == 1
    second = only(tmp_path, alpaca(3, preference=2))
    assert (second.chosen, second.rejected) == ("Elm 3.", "Oak 3.")


def test_the_input_follows_the_instruction(tmp_path):
    assert only(tmp_path, alpaca(3, input="In Spain.")).prompt == "Name 3 trees.\n\nIn Spain."
    assert only(tmp_path, alpaca(3, input=None)).prompt == "Name 3 trees."


def test_texts_with_a_prompt_are_taken_as_they_are(tmp_path):
    read = only(tmp_path, pair(1, score=0.5))
    assert (read.prompt, read.chosen, read.rejected) == ("Name 1 trees.", "Oak 1.", "Elm 1.")
    assert read.columns["score"] == 0.5


USER = {"role": "user", "content": "Hi"}
GOOD, BAD = {"role": "assistant", "content": "Hello."}, {"role": "assistant", "content": "What?"}
MORE = {"role": "user", "content": "And now?"}


@pytest.mark.parametrize(
    ("row", "prompt", "messages"),
    [
        ({"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}, "Hi", [USER]),
        ({"prompt": [USER], "chosen": "Hello.", "rejected": "What?"}, "Hi", [USER]),
        ({"chosen": [USER, GOOD], "rejected": [USER, BAD]}, "Hi", [USER]),
        ({"prompt": "Hi", "chosen": [USER, GOOD], "rejected": [USER, BAD]}, "Hi", None),
        (
            {"chosen": [USER, BAD, MORE, GOOD], "rejected": [USER, BAD, MORE, BAD]},
            "user: Hi\n\nassistant: What?\n\nuser: And now?",
            [USER, BAD, MORE],
        ),
    ],
)
def test_chat_messages_are_read_with_and_without_a_prompt(tmp_path, row, prompt, messages):
    read = only(tmp_path, row)
    assert (read.prompt, read.chosen, read.rejected) == (prompt, "Hello.", "What?")
    assert read.columns.get("messages") == messages


def test_a_system_message_is_part_of_the_prompt():
    assert conversation_text([{"role": "system", "content": "Be brief."}, USER]) == "system: Be brief.\n\nuser: Hi"


def test_two_transcripts_share_all_but_their_last_turn(tmp_path):
    start = "\n\nHuman: Hi\n\nAssistant: Yes?\n\nHuman: Why?\n\nAssistant:"
    read = only(tmp_path, {"chosen": f"{start} So.", "rejected": f"{start} No."})
    assert read.prompt == "Human: Hi\n\nAssistant: Yes?\n\nHuman: Why?\n\nAssistant:"
    assert (read.chosen, read.rejected) == ("So.", "No.")


def test_a_published_file_may_have_a_few_empty_rows(tmp_path):
    rows = [pair(number) for number in range(200)]
    loaded = load(tmp_path, [*rows, pair(200, chosen=" "), pair(201, prompt="")])
    assert len(loaded.train) + len(loaded.test) == 200
    assert loaded.notices == ("2 pairs without a prompt or a chosen answer dropped",)
    with pytest.raises(UserError, match=r"line 201: the chosen answer is empty; repair or remove the row"):
        load(tmp_path, [*rows, pair(200, chosen=""), pair(201, prompt=""), pair(202, prompt="")])


def test_ties_repeats_and_contradictions_are_counted(tmp_path):
    rows = [alpaca(number) for number in range(40)]
    rows += [alpaca(0), alpaca(0), alpaca(1, preference=2)]
    rows += [alpaca(50, preference=0), alpaca(51, preference=1.5), alpaca(52, output_2="Oak 52.")]
    loaded = load(tmp_path, rows, test_fraction=0.3)
    assert loaded.notices == (
        "3 ties dropped (no preference, or equal answers)",
        "2 repeated pairs dropped",
        "2 pairs kept although others prefer the opposite",
    )
    pairs = (*loaded.train, *loaded.test)
    assert len(pairs) == 41
    assert sorted(one.chosen for one in pairs if one.prompt == "Name 1 trees.") == ["Elm 1.", "Oak 1."]


def test_a_prompt_never_stands_on_both_sides_and_more_rows_move_none(tmp_path):
    rows = [pair(number, chosen=f"Oak {number} {answer}.") for answer in range(3) for number in range(100)]
    rows += [pair(f" {number} ", chosen="Ash.") for number in range(100)]  # the same but for spacing
    loaded = load(tmp_path, rows, test_fraction=0.3)
    train, test = loaded.train, loaded.test
    sides = [{"".join(one.prompt.split()) for one in side} for side in (train, test)]
    assert sides[0].isdisjoint(sides[1])
    assert len(train) + len(test) == 400
    assert 15 <= len(sides[1]) <= 45
    fewer = load(tmp_path, rows[:100], test_fraction=0.3)
    assert {"".join(one.prompt.split()) for one in fewer.test} == sides[1]


def test_two_files_are_the_two_sides_and_shared_prompts_leave_training(tmp_path):
    path = write(tmp_path, [pair(number) for number in range(4)], "preference.jsonl")
    test_path = write(tmp_path, [pair(2, chosen="Fir."), pair(9)], "val.jsonl")
    loaded = load_preferences(PreferencesConfig(path=path, test_path=test_path))
    assert [one.id for one in loaded.train] == ["train/0", "train/1", "train/3"]
    assert [one.id for one in loaded.test] == ["test/0", "test/1"]
    assert loaded.notices == ("1 training pairs dropped: their prompts are held out",)


def test_pairs_are_frozen_and_complete():
    one = PreferencePair(id="0", prompt="p", chosen="a", rejected="b")
    assert one.columns == {}
    with pytest.raises(AttributeError):
        one.chosen = "c"


def test_as_a_task_each_prompt_is_one_example_with_the_chosen_answer_as_gold(tmp_path):
    rows = [pair(number, chosen=f"Oak {number} {answer}.") for number in range(50) for answer in range(2)]
    config = {"type": "preferences", "name": "trees", "path": write(tmp_path, [*rows, rows[0]]), "test_fraction": 0.2}
    task = build_task(TypeAdapter(TaskConfig).validate_python(config))
    assert task.name == "trees"
    assert len(task.train) + len(task.test) == 50
    assert all(e.gold == e.columns["chosen"] and e.gold.endswith(" 0.") for e in (*task.train, *task.test))
    assert task.train[0].question == task.train[0].columns["prompt"]
    assert task.notices == ("1 repeated pairs dropped",)


def test_without_files_the_configured_splits_of_the_hub_are_read(monkeypatch, tmp_path):
    asked = []

    def hub(name, *, config, split, path_option):
        from flatpeak.tasks.data_files import Row

        asked.append((name, config, split, path_option))
        first = 0 if split == "preference" else 50
        return (Row(where=f"row {n}", values=alpaca(n)) for n in range(first, first + 30))

    monkeypatch.setattr(preferences, "read_hub", hub)
    named = {"hub": "org/pairs", "hub_file": None, "hub_config": "trees", "split": "preference"}
    loaded = load_preferences(PreferencesConfig(**named, test_fraction=0.5))
    assert asked == [("org/pairs", "trees", "preference", "task.path, a file")]
    assert len(loaded.train) + len(loaded.test) == 30
    both = load_preferences(PreferencesConfig(**named, test_split="val"))
    assert (len(both.train), len(both.test)) == (30, 30)


def test_of_alpaca_farm_one_json_file_is_fetched_as_its_splits_need_a_script(monkeypatch, tmp_path):
    asked = []

    def fetch(repository, file, *, repo_type):
        asked.append((repository, file, repo_type))
        path = tmp_path / file
        path.write_text(json.dumps([alpaca(number) for number in range(40)]))
        return str(path)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fetch)
    loaded = load_preferences(PreferencesConfig(test_fraction=0.5))
    assert asked == [("tatsu-lab/alpaca_farm", "alpaca_human_preference.json", "dataset")]
    assert len(loaded.train) + len(loaded.test) == 40
    with pytest.raises(UserError, match=r"task.test_split=val with a task.hub_file: set task.hub_file=null"):
        load_preferences(PreferencesConfig(test_split="val"))


def test_pairs_of_a_tasks_own_training_prompts_need_another_seed_and_the_error_says_so(tmp_path):
    prompts = write(
        tmp_path, [{"question": pair(number)["prompt"], "answer": "1"} for number in range(60)], "own.jsonl"
    )
    own = build_task(TypeAdapter(TaskConfig).validate_python({"type": "rows", "train": [{"path": prompts}]})).train
    assert 0 < len(own) < 60
    pairs = [pair(0, prompt=example.question) for example in own]
    with pytest.raises(
        UserError, match=rf"gives {len(own)} training and 0 held-out pairs: .* same task\.seed: set anothe"
    ):
        load(tmp_path, pairs, test_fraction=0.2)
    assert load(tmp_path, pairs, test_fraction=0.2, seed=1).test
