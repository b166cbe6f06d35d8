import json

import pytest

from flatpeak.errors import UserError
from flatpeak.tasks.bad_rows import BadRowLog
from flatpeak.tasks.config import build_task
from flatpeak.tasks.data_files import SourceConfig
from flatpeak.tasks.rows import RowsConfig

WAY_OUT = " (task.bad_rows=skip leaves such rows out)"
GOOD = [{"question": f"What is {i} squared?", "answer": i * i} for i in range(50)]
BROKEN = {
    "not JSON": '{"question": "q", "answer": 1',
    "not UTF-8": b'{"question": "\xff", "answer": 1}',
    "not an object": "[1, 2]",
    "half a character": r'{"question": "\ud800", "answer": 1}',
    "a missing question": '{"answer": 1}',
    "a missing answer": '{"question": "q"}',
    "a null question": '{"question": null, "answer": 1}',
    "a null answer": '{"question": "q", "answer": null}',
    "an empty question": '{"question": " ", "answer": 1}',
    "an object as question": '{"question": {"text": "q"}, "answer": 1}',
    "an object as answer": '{"question": "q", "answer": {"value": 1}}',
    "an infinite answer": '{"question": "q", "answer": Infinity}',
    "messages that nobody asks": '{"question": [{"role": "system", "content": "q"}], "answer": 1}',
}


def lines(rows):
    return [json.dumps(row) for row in rows]


@pytest.fixture
def config(tmp_path):
    """Makes the task's config from the lines of its training file."""

    def write(given, *, name="rows.jsonl", test=GOOD[:1], **settings):
        encoded = [line if isinstance(line, bytes) else line.encode() for line in given]
        (tmp_path / name).write_bytes(b"\n".join(encoded) + b"\n")
        (tmp_path / "test.jsonl").write_text("\n".join(lines(test)) + "\n")
        train, held_out = (SourceConfig(path=str(tmp_path / file)) for file in (name, "test.jsonl"))
        return RowsConfig(train=(train,), test=(held_out,), **settings)

    return write


@pytest.mark.parametrize("line", BROKEN.values(), ids=BROKEN)
def test_a_bad_row_is_refused_by_default_and_can_be_left_out(config, line):
    given = [*lines(GOOD[1:5]), line, *lines(GOOD[5:9])]
    with pytest.raises(
        UserError, match=r"rows\.jsonl line 5: .* \(task\.bad_rows=skip leaves such rows out\)$"
    ) as error:
        build_task(config(given))
    task = build_task(config(given, bad_rows="skip"))
    assert [example.question for example in task.train] == [row["question"] for row in GOOD[1:9]]
    reason = str(error.value).removesuffix(WAY_OUT)
    assert task.notices == (f"1 of 10 rows left out (task.bad_rows=skip); the first: {reason}",)


def test_one_notice_counts_the_bad_rows_of_both_sides(config):
    bad = BROKEN["a null answer"]
    given = config([*lines(GOOD[1:9]), bad], test=[GOOD[0], json.loads(bad)], bad_rows="skip")
    (notice,) = build_task(given).notices
    assert notice.startswith("2 of 11 rows left out (task.bad_rows=skip); the first: ")
    assert "rows.jsonl line 9: the answer (task.train.0.answer=answer) is empty" in notice


def test_data_without_bad_rows_are_the_same_with_either_setting(config):
    given = lines(GOOD[1:20])
    assert build_task(config(given)) == build_task(config(given, bad_rows="skip"))


@pytest.mark.parametrize(("good", "bad"), [(5, 10), (1188, 12), (99_900, 100)])
def test_ten_bad_rows_or_one_in_a_hundred_are_left_out(good, bad):
    (notice,) = log_of(good, bad).notices()
    assert notice == f"{bad} of {good + bad} rows left out (task.bad_rows=skip); the first: rows.jsonl line 0: broken"


@pytest.mark.parametrize(("good", "bad"), [(5, 11), (1187, 12)])
def test_more_bad_rows_are_an_error_that_lists_the_first(good, bad):
    with pytest.raises(UserError) as error:
        log_of(good, bad).notices()
    assert str(error.value) == (
        f"{bad} of {good + bad} rows cannot be used, and task.bad_rows=skip leaves out at most 10, or 1% of many: "
        "rows.jsonl line 0: broken; rows.jsonl line 1: broken; rows.jsonl line 2: broken; ..."
    )


def log_of(good, bad):
    log = BadRowLog("skip")
    log.usable = good
    for number in range(bad):
        with log:
            raise UserError(f"rows.jsonl line {number}: broken")
    return log


def test_errors_that_are_not_about_a_row_pass_a_log_that_skips():
    log = BadRowLog("skip")
    with pytest.raises(KeyboardInterrupt), log:
        raise KeyboardInterrupt
    with pytest.raises(OSError, match="disk"), log:
        raise OSError("disk")
    assert log.notices() == ()


def test_rows_of_csv_and_json_files_are_left_out_too(config):
    task = build_task(config(["question,answer", "one?,1", "two,1,2", "three?,3", ",4"], name="a.csv", bad_rows="skip"))
    assert [example.gold for example in task.train] == ["1", "3"]
    assert task.notices[0].startswith("2 of 5 rows left out")
    task = build_task(config([json.dumps([*GOOD[1:4], 5])], name="rows.json", bad_rows="skip"))
    assert [example.gold for example in task.train] == ["1", "4", "9"]
    assert "rows.json row 4: expected an object with named columns, found int" in task.notices[0]


def test_rows_that_integers_only_leaves_out_are_not_bad(config):
    rows = [*GOOD[1:4], {"question": "Which day?", "answer": "Monday"}]
    task = build_task(config(lines(rows), bad_rows="skip", integers_only=True))
    assert (len(task.train), task.notices) == (3, ())
