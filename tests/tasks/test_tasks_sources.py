import json

import pytest

from flatpeak.errors import UserError
from flatpeak.tasks.sources import read_file


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
        ("a.jsonl", b'{"q": 1}\n{"q": \n', "a.jsonl line 2: not valid JSON"),
        ("a.jsonl", b'{"q": 1}\n[1, 2]\n', "a.jsonl line 2: expected an object with named columns, found list"),
        ("a.jsonl", b'{"q": 1}\n{"q": "\xff\xfe"}\n', "a.jsonl line 2: not UTF-8 text"),
        ("a.json", b'{"q": 1}\n{"q": 2}\n', "a.json: not valid JSON"),
        ("a.json", b'{"q": 1}', "a.json: a .json file holds one list"),
        ("a.json", b'[{"q": 1}, 5]', "a.json row 2: expected an object"),
        ("a.csv", b"q,a\n1,2\n1,2,3\n", "a.csv line 3: 3 cells under 2 columns"),
        ("a.csv", b"q,q\n1,2\n", "a.csv line 1: the header needs a distinct name"),
        ("a.csv", b'q,a\n"x"y,2\n', "a.csv line 2: not valid CSV"),
        ("a.parquet", b"", "cannot read .parquet; use .jsonl, .json or .csv"),
    ],
)
def test_a_broken_file_is_an_error_that_says_where(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        read(tmp_path / name)


def test_a_missing_file_or_a_directory_names_the_setting(tmp_path):
    with pytest.raises(UserError, match=r"task.train.0.path=.*nothing.jsonl: does not exist"):
        read(tmp_path / "nothing.jsonl")
    with pytest.raises(UserError, match=r"is a directory; name a .jsonl"):
        read(tmp_path)
