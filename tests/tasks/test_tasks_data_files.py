import csv
import json
from zipfile import ZipFile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatpeak.errors import UserError
from flatpeak.tasks.data_files import read_csv_cells, read_file, read_hub, read_objects, read_split
from support.properties import repeatable


def read(file):
    return list(read_file(str(file), option="task.train.0.path"))


def test_jsonl_passes_over_blank_lines_and_counts_them(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_bytes('\ufeff{"q": "é\u2028ü"}\r\n\r\n{"q": 2}'.encode())
    rows = read(file)
    assert [row.values for row in rows] == [{"q": "é\u2028ü"}, {"q": 2}]
    assert [row.where for row in rows] == [f"{file} line 1", f"{file} line 3"]


def test_json_holds_a_list_of_objects(tmp_path):
    file = tmp_path / "rows.json"
    file.write_text(json.dumps([{"q": 1}, {"q": 2}], indent=1))
    assert [(row.where, row.values) for row in read(file)] == [(f"{file} row 1", {"q": 1}), (f"{file} row 2", {"q": 2})]


def test_a_csv_cell_may_be_longer_than_python_reads_by_default(tmp_path):
    file = tmp_path / "rows.csv"
    file.write_text(f'question,answer\n"{"long, " * 30_000}",a\n')
    (row,) = read(file)
    assert (len(row.values["question"]), row.values["answer"]) == (180_000, "a")


def test_csv_handles_quotes_and_line_breaks_in_cells(tmp_path):
    file = tmp_path / "rows.csv"
    file.write_text('q,a\n"two\nlines, one comma",7\n\nplain\u2028text,8\n')
    rows = read(file)
    assert [row.values for row in rows] == [
        {"q": "two\nlines, one comma", "a": "7"},
        {"q": "plain\u2028text", "a": "8"},
    ]
    assert rows[1].where.endswith("line 5")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"q": 1}\n{"q": "\xff\xfe"}\n', "a.jsonl line 2: not UTF-8 text"),
        ("a.parquet", b"", "a.parquet: not a readable Parquet file .*; fetch it again"),
    ],
)
def test_a_broken_file_is_an_error_that_says_where(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        read(tmp_path / name)


TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\r\0"))
VALUES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS
TABLES = st.lists(st.sampled_from("abcd"), min_size=1, unique=True).flatmap(
    lambda columns: st.lists(st.fixed_dictionaries(dict.fromkeys(columns, TEXTS)), min_size=1, max_size=4)
)


@given(rows=st.lists(st.dictionaries(TEXTS, VALUES | st.lists(VALUES, max_size=2), max_size=3), max_size=4))
@repeatable
def test_json_is_read_as_it_was_written(rows, tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")
    (tmp_path / "a.json").write_text(json.dumps(rows), "utf-8")
    assert (
        [row.values for row in read(tmp_path / "a.jsonl")] == [row.values for row in read(tmp_path / "a.json")] == rows
    )


@given(rows=TABLES)
@repeatable
def test_csv_is_read_as_it_was_written(rows, tmp_path):
    with (tmp_path / "a.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, rows[0], quoting=csv.QUOTE_ALL)
        writer.writeheader()
        writer.writerows(rows)
    assert [row.values for row in read(tmp_path / "a.csv")] == rows


OBJECTS = {"b/10.json": {"n": 10}, "b/2.json": {"n": 2}, "a.json": {"n": 1}, "b/notes.txt": None}


@pytest.fixture(params=["folder", "archive"])
def objects(request, tmp_path):
    """One JSON object per file, in a directory or in a zip archive with the shadow files of a Mac."""
    texts = {name: json.dumps(value) for name, value in OBJECTS.items()}
    if request.param == "archive":
        with ZipFile(tmp_path / "all.zip", "w") as archive:
            for name, text in (texts | {"__MACOSX/._a.json": "\0"}).items():
                archive.writestr(name, text)
        return tmp_path / "all.zip"
    for name, text in texts.items():
        (tmp_path / "all" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "all" / name).write_text(text)
    return tmp_path / "all"


def test_a_folder_or_archive_of_objects_is_read_in_the_natural_order_of_its_files(objects):
    rows = list(read_objects(str(objects), option="task.path"))
    assert [row.values["n"] for row in rows] == [1, 2, 10]
    assert rows[1].where == f"{objects}/b/2.json"


def test_a_broken_object_is_an_error_that_names_its_file_in_the_archive(tmp_path):
    for name, content, message in (("x.json", "[1]", "expected an object"), ("y.json", "{", "not valid JSON")):
        with ZipFile(tmp_path / "bad.zip", "w") as archive:
            archive.writestr(name, content)
        with pytest.raises(UserError, match=rf"bad\.zip/{name}: {message}"):
            list(read_objects(str(tmp_path / "bad.zip"), option="task.path"))
    with pytest.raises(UserError, match=r"task\.path=.*absent: neither a directory nor a \.zip archive"):
        list(read_objects(str(tmp_path / "absent"), option="task.path"))


def test_a_damaged_archive_is_an_error_that_names_the_file(tmp_path):
    with ZipFile(tmp_path / "all.zip", "w") as archive:
        archive.writestr("x.json", '{"text": "some words"}')
    content = (tmp_path / "all.zip").read_bytes()
    (tmp_path / "all.zip").write_bytes(content.replace(b"some words", b"same words"))
    with pytest.raises(UserError, match=r"all\.zip/x\.json: cannot be unpacked .*; fetch the archive again"):
        list(read_objects(str(tmp_path / "all.zip"), option="task.path"))


def test_a_split_is_found_by_its_name_or_by_its_shards(tmp_path):
    from pyarrow import Table
    from pyarrow.parquet import write_table

    for shard, values in (("00000", [1, 2]), ("00001", [3])):
        (tmp_path / "data").mkdir(exist_ok=True)
        table = Table.from_pylist([{"n": n, "list": ["x", "y"]} for n in values])
        write_table(table, tmp_path / "data" / f"train-{shard}-of-00002.parquet")
    rows = list(read_split(str(tmp_path), "train", option="task.path"))
    assert [row.values for row in rows] == [{"n": n, "list": ["x", "y"]} for n in (1, 2, 3)]
    assert rows[2].where.endswith("train-00001-of-00002.parquet row 1")
    (tmp_path / "train.jsonl").write_text('{"n": 9}\n')
    assert [row.values for row in read_split(str(tmp_path), "train", option="task.path")] == [{"n": 9}]
    with pytest.raises(UserError, match=r"task\.path=.*: no test\.jsonl in it"):
        read_split(str(tmp_path), "test", option="task.path")


def test_cells_without_a_header_get_the_names_that_are_given(tmp_path):
    (tmp_path / "a.csv").write_text('"two\nlines",x\nq,"a ""b"""\n')
    rows = list(read_csv_cells(tmp_path / "a.csv", columns=("q", "a")))
    assert [row.values for row in rows] == [{"q": "two\nlines", "a": "x"}, {"q": "q", "a": 'a "b"'}]
    assert rows[1].where.endswith("a.csv line 3")


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("9" * 6000, "a whole number with too many digits; write it as a text, in quotes"),
        ("[" * 200_000 + "]" * 200_000, "nested too deeply"),
    ],
    ids=["digits", "brackets"],
)
def test_json_that_python_cannot_keep_is_refused_with_its_line(tmp_path, value, problem):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"q": "1+1"}\n{"q": ' + value + "}\n")
    with pytest.raises(UserError) as error:
        read(file)
    assert str(error.value).startswith(f"{file} line 2: ")
    assert problem in str(error.value)


def test_a_pair_of_surrogates_in_json_is_one_character(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text(r'{"q": "\ud83d\ude00"}')
    assert read(file)[0].values == {"q": "\U0001f600"}


@pytest.mark.parametrize(("config", "part"), [(None, "(split test)"), ("main", "(config main, split test)")])
def test_a_data_set_that_is_not_at_hand_is_named_with_what_was_asked_of_it(monkeypatch, config, part):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError) as caught:
        list(read_hub("someone/never-fetched", config=config, split="test", path_option="task.test.0.path"))
    assert str(caught.value).startswith(f"someone/never-fetched {part} cannot be loaded from the Hub: ")
    assert str(caught.value).endswith("or give a local copy as task.test.0.path")
