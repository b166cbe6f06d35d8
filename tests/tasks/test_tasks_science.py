import json
import zipfile

import huggingface_hub
import pyarrow
import pyarrow.parquet
import pytest
from pydantic import TypeAdapter

from flatpeak.errors import UserError
from flatpeak.tasks import science
from flatpeak.tasks.config import TaskConfig, build_task

STARS = [
    "Sirius",
    "Vega",
    "Rigel",
    "Altair",
    "Deneb",
    "Spica",
    "Antares",
    "Pollux",
    "Castor",
    "Mimosa",
    "Adhara",
    "Shaula",
    "Alnair",
    "Mirfak",
    "Dubhe",
    "Wezen",
]
STONES = ["agate", "beryl", "coral", "flint", "garnet", "jade", "lazuli", "marble", "onyx", "pearl", "quartz", "ruby"]


def build(**task):
    return build_task(TypeAdapter(TaskConfig).validate_python(task))


def camel_row(topic, sub_topic, *, n=0, topic_column="topic;"):
    """A row of our own in the published columns; the wording of no two is alike."""
    question = f"Why does {topic} weigh {sub_topic} against {topic}{sub_topic} as {'very ' * n}{sub_topic}{n} does?"
    return {
        "role_1": "Physicist",
        topic_column: topic,
        "sub_topic": sub_topic,
        "message_1": question,
        "message_2": f"Because {sub_topic} is {n}.",
    }


def camel_rows(**more):
    return [camel_row(star, stone, **more) for star in STARS for stone in STONES]


def write_zip(folder, subject, rows):
    with zipfile.ZipFile(folder / f"{subject}.zip", "w") as archive:
        for number, row in enumerate(rows):
            archive.writestr(f"{subject}/{number:03d}_001_001.json", json.dumps(row))


def write_jsonl(folder, subject, rows):
    (folder / f"{subject}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def physics(folder, **settings):
    return build(
        type="camel_ai",
        subjects=["physics"],
        path=str(folder),
        **{"test_fraction": 0.2, "near_duplicates": None, **settings},
    )


def cells(examples):
    return {(e.columns["subject"], e.columns["topic"], e.columns["sub_topic"]) for e in examples}


def test_a_zip_of_one_json_file_per_row_is_read_as_published(tmp_path):
    write_zip(tmp_path, "physics", camel_rows())
    task = physics(tmp_path)
    assert task.name == "camel_ai"
    assert len(task.train) + len(task.test) == len(STARS) * len(STONES)
    first = next(e for e in (*task.train, *task.test) if e.id == "physics/0")
    assert first.question == "Why does Sirius weigh agate against Siriusagate as agate0 does?"
    assert first.gold == "Because agate is 0."
    assert first.subsets == {"subject": "physics", "topic": "Sirius"}
    assert first.columns["role_1"] == "Physicist"
    assert first.columns["topic"] == "Sirius"
    assert task.notices == ()


@pytest.mark.parametrize("column", ["topic;", "topic"])
def test_a_folder_of_files_jsonl_and_either_name_of_the_topic_give_the_same_rows(tmp_path, column):
    rows = camel_rows(topic_column=column)
    for kind in ("files", "lines", "list"):
        (tmp_path / kind).mkdir()
    (tmp_path / "files" / "physics").mkdir()
    for number, row in enumerate(rows):
        (tmp_path / "files" / "physics" / f"{number:03d}.json").write_text(json.dumps(row))
    write_jsonl(tmp_path / "lines", "physics", rows)
    (tmp_path / "list" / "physics.json").write_text(json.dumps(rows))
    tasks = [physics(tmp_path / kind) for kind in ("files", "lines", "list")]
    assert tasks[0].train == tasks[1].train == tasks[2].train
    assert tasks[0].test == tasks[1].test == tasks[2].test


def test_whole_cells_are_held_out_and_more_rows_move_none_across(tmp_path):
    write_jsonl(tmp_path, "physics", camel_rows())
    before = physics(tmp_path)
    write_jsonl(tmp_path, "physics", [row for n in range(3) for row in camel_rows(n=n)])
    after = physics(tmp_path)
    assert len(after.train) + len(after.test) == 3 * len(STARS) * len(STONES)
    assert cells(after.train).isdisjoint(cells(after.test))
    assert cells(after.test) == cells(before.test)
    assert 0.1 < len(before.test) / len(STARS) / len(STONES) < 0.3
    assert cells(physics(tmp_path, seed=1).test) != cells(after.test)


def test_the_same_topics_of_two_subjects_are_held_out_apart(tmp_path):
    for subject in ("physics", "chemistry"):
        write_jsonl(tmp_path, subject, [{**row, "message_1": f"{subject} {row['message_1']}"} for row in camel_rows()])
    task = build(type="camel_ai", subjects=["physics", "chemistry"], path=str(tmp_path), test_fraction=0.2)
    test_rows = {
        subject: {(topic, sub) for own, topic, sub in cells(task.test) if own == subject}
        for subject in ("physics", "chemistry")
    }
    assert test_rows["physics"] != test_rows["chemistry"]
    assert {e.subsets["subject"] for e in task.test} == {"physics", "chemistry"}


def test_repeated_and_nearly_repeated_questions_are_dropped_and_counted(tmp_path):
    rows = camel_rows()
    again = {**rows[0], "message_1": rows[0]["message_1"].upper(), "topic;": "elsewhere"}
    near = {**rows[1], "message_1": rows[1]["message_1"] + " Go", "topic;": "elsewhere"}
    write_jsonl(tmp_path, "physics", [*rows, again, near])
    exact = physics(tmp_path)
    assert exact.notices == ("1 of 194 rows dropped: their questions repeat others",)
    both = physics(tmp_path, near_duplicates=0.85)
    assert both.notices == ("2 of 194 rows dropped: their questions repeat others",)
    assert not any(topic == "elsewhere" for _, topic, _ in cells((*both.train, *both.test)))


def test_training_rows_that_overlap_an_evaluation_set_are_dropped_and_counted(tmp_path):
    write_jsonl(tmp_path, "physics", camel_rows())
    free = physics(tmp_path)
    taken = [free.train[0], free.train[5], free.test[0]]
    (tmp_path / "pro.jsonl").write_text(
        "".join(json.dumps({"question": e.question.lower(), "answer": "B"}) + "\n" for e in taken)
    )
    overlap = {"sources": [{"path": str(tmp_path / "pro.jsonl")}], "similarity": None}
    task = physics(tmp_path, overlap=overlap)
    assert [e.id for e in task.train] == [e.id for e in free.train if e not in taken]
    assert task.test == free.test
    assert task.notices == (
        f"2 of {len(free.train)} training rows dropped: they overlap the 3 questions of task.overlap",
    )


def test_one_row_in_a_hundred_may_be_empty_and_no_more(tmp_path):
    rows = camel_rows()
    rows[7] = {**rows[7], "message_2": "  "}
    write_jsonl(tmp_path, "physics", rows)
    task = physics(tmp_path)
    assert len(task.train) + len(task.test) == len(rows) - 1
    assert task.notices == (
        f"1 rows without a question, an answer or a topic dropped, {tmp_path / 'physics.jsonl'} line 8 first",
    )
    rows[8] = {**rows[8], "message_1": ""}
    write_jsonl(tmp_path, "physics", rows)
    with pytest.raises(UserError, match=r"2 of 192 rows lack a question, an answer or a topic \(.*line 8, .*line 9\)"):
        physics(tmp_path)


def test_a_row_without_a_column_is_named(tmp_path):
    rows = camel_rows()
    rows[2] = {"message1": "x", **{name: value for name, value in rows[2].items() if name != "message_1"}}
    write_zip(tmp_path, "physics", rows)
    with pytest.raises(UserError, match=r"physics.zip/physics/002_001_001.json: no column 'message_1', did you mean"):
        physics(tmp_path)


@pytest.mark.parametrize(
    ("task", "asked"),
    [
        ({"type": "camel_ai", "subjects": ["chemistry"]}, ("camel-ai/chemistry", "chemistry.zip")),
        ({"type": "dr_sci"}, ("MiniByte-666/Dr.SCI", "Dr_SCI_open-ended.parquet")),
    ],
)
def test_without_a_path_the_published_file_is_fetched_and_failure_names_the_option(monkeypatch, task, asked):
    calls = []

    def no_network(repository, file, *, repo_type):
        calls.append((repository, file, repo_type))
        raise OSError("no route to host")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", no_network)
    with pytest.raises(UserError, match=r"cannot be fetched from the Hub: no route to host; .* as task.path"):
        build(**task)
    assert calls == [(*asked, "dataset")]


def test_a_fetched_zip_is_read(monkeypatch, tmp_path):
    write_zip(tmp_path, "biology", camel_rows())
    monkeypatch.setattr(science, "fetch_file", lambda repository, file, *, path_option: tmp_path / file)
    task = build(type="camel_ai", subjects=["biology"], test_fraction=0.2)
    assert len(task.test) > 10


RUBRIC = [{"title": "Names the force", "description": "Says that it is gravity.", "weight": 5}]


def dr_sci_row(star, stone, *, open_ended=True):
    question = f"Explain how {star} and {stone} make {star}{stone} of {stone}{star}."
    reward_model = {"style": "rubric", "ground_truth": f"By {stone}."}
    return {
        "data_source": "ours",
        "prompt": [{"role": "user", "content": f"{question} Think."}],
        "reward_model": reward_model | ({"rubric": RUBRIC} if open_ended else {}),
        "extra_info": {
            "question": question,
            "reference_answer": f"By {stone}.",
            "subject": "physics" if star < "M" else "biology",
            "difficulty": 0.25,
            "match_rule": not open_ended,
            "from": "ours",
        },
    }


@pytest.fixture
def dr_sci(tmp_path):
    for component in ("open-ended", "verifiable"):
        rows = [dr_sci_row(star, stone, open_ended=component == "open-ended") for star in STARS for stone in STONES]
        if component == "verifiable":
            rows = [
                {
                    **row,
                    "extra_info": {
                        **row["extra_info"],
                        "question": row["extra_info"]["question"]
                        + " Give a number only, please, right away, without words.",
                    },
                }
                for row in rows
            ]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / f"Dr_SCI_{component}.parquet")
    return tmp_path


def test_dr_sci_open_ended_rows_have_their_rubric(dr_sci):
    task = build(type="dr_sci", path=str(dr_sci), test_fraction=0.2)
    assert task.name == "dr_sci"
    assert len(task.train) + len(task.test) == 192
    first = next(e for e in (*task.train, *task.test) if e.id == "open-ended/0")
    assert first.question == "Explain how Sirius and agate make Siriusagate of agateSirius."
    assert first.gold == "By agate."
    assert first.columns["rubric"] == RUBRIC
    assert first.columns["extra_info"]["difficulty"] == 0.25
    assert first.subsets == {"part": "open-ended", "subject": "biology"}
    assert 0.1 < len(task.test) / 192 < 0.3


def test_dr_sci_parts_subjects_rows_and_topics_are_chosen(dr_sci):
    both = build(type="dr_sci", path=str(dr_sci), parts=["open-ended", "verifiable"], test_fraction=0.2)
    assert len(both.train) + len(both.test) == 384
    assert {e.subsets["part"] for e in both.train} == {"open-ended", "verifiable"}
    assert all(e.columns["rubric"] == [] for e in both.train if e.subsets["part"] == "verifiable")
    one = build(type="dr_sci", path=str(dr_sci), subjects=["physics"], rows=120, test_fraction=0.2)
    assert {e.subsets["subject"] for e in one.train} == {"physics"}
    assert len(one.train) + len(one.test) == 12 * sum(star < "M" for star in STARS[:10])
    by_answer = build(type="dr_sci", path=str(dr_sci), topic="reward_model.ground_truth", test_fraction=0.3)
    sides = [{(e.subsets["subject"], e.subsets["topic"]) for e in side} for side in (by_answer.train, by_answer.test)]
    assert len(sides[0] | sides[1]) == 2 * len(STONES)
    assert sides[0].isdisjoint(sides[1])


def test_a_dr_sci_column_that_is_not_there_is_named_with_the_nearest(dr_sci):
    with pytest.raises(
        UserError,
        match=r"no 'questions' in 'extra_info' \(task.question\), did you mean 'question'\?; it has 'question', ",
    ):
        build(type="dr_sci", path=str(dr_sci), question="extra_info.questions")
    with pytest.raises(UserError, match=r"row 1: no 'x' in 'data_source' \(task.subject\); that is a str"):
        build(type="dr_sci", path=str(dr_sci), subject="data_source.x")
