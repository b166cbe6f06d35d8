"""Tables on disk: exact numbers, types, headers, and times in columns of their own."""

import math
from pathlib import Path
from typing import Any

import pytest

from flatpeak.errors import UserError
from flatpeak.experiments.table import SweepTable, read_table, write_table

CELLS: list[Any] = [
    None,
    True,
    False,
    0,
    -7,
    0.1,
    1e-05,
    5e-324,
    1.7976931348623157e308,
    2.0,
    "ratio:0.3",
    "",
    "1.0",
    "1e-3",
    "nan",
    "true",
    "-",
    '"quoted"',
    "[0]",
    "{braces",
    "a,b",
    "line\nbreak",
    "carriage\rreturn",
    "both\r\nof them",
    "no letter \udc80",
    " space ",
    "# no comment",
    [1, 2.5, None],
    {"type": "function"},
]


def table_of(cells: list[Any]) -> SweepTable:
    rows = tuple({"arm": "none", "value": cell} for cell in cells)
    return SweepTable(header={"seeds": "1-2", "command": "flatpeak sweep x.yaml"}, columns=("arm", "value"), rows=rows)


@pytest.mark.parametrize("suffix", [".csv", ".json"])
def test_every_cell_survives_the_round_trip_with_its_type(tmp_path: Path, suffix: str) -> None:
    table = table_of(CELLS)
    write_table(table, tmp_path / f"table{suffix}")
    again = read_table(tmp_path / f"table{suffix}")
    assert again == table
    assert [type(row["value"]) for row in again.rows] == [type(cell) for cell in CELLS]


def test_a_number_that_is_not_finite_stays_one(tmp_path: Path) -> None:
    write_table(table_of([math.nan, math.inf]), tmp_path / "table.csv")
    nan, inf = read_table(tmp_path / "table.csv").column("value")
    assert math.isnan(nan)
    assert inf == math.inf


def test_the_header_stands_above_the_columns_as_comments(tmp_path: Path) -> None:
    write_table(table_of([1]), tmp_path / "table.csv")
    assert (tmp_path / "table.csv").read_text() == (
        "# seeds: 1-2\n# command: flatpeak sweep x.yaml\narm,value\nnone,1\n"
    )


def test_a_header_with_bytes_that_are_no_text_can_be_written(tmp_path: Path) -> None:
    table = SweepTable(header={"command": "sweep \udc80.yaml"}, columns=("arm",), rows=({"arm": "none"},))
    write_table(table, tmp_path / "t.csv")
    assert read_table(tmp_path / "t.csv").header == {"command": "sweep \\udc80.yaml"}


def test_tables_of_spreadsheets_with_a_byte_order_mark_and_empty_lines_are_read(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(b"\xef\xbb\xbfarm,seed\r\nnone,1\r\n\r\nkl,2\r\n\r\n")
    table = read_table(path)
    assert table.columns == ("arm", "seed")
    assert table.rows == ({"arm": "none", "seed": 1}, {"arm": "kl", "seed": 2})


def test_columns_of_times_can_be_left_out() -> None:
    columns = ("arm", "reward/gold.last", "time/step.final", "throughput/x.last", "seconds")
    table = SweepTable(header={}, columns=columns, rows=(dict.fromkeys(columns, 1.0),))
    assert table.without_times().columns == ("arm", "reward/gold.last")
    assert table.without_times().rows == ({"arm": 1.0, "reward/gold.last": 1.0},)


def test_an_unknown_column_is_refused_with_the_nearest() -> None:
    with pytest.raises(UserError, match="no column 'vale', did you mean 'value'"):
        table_of([1]).column("vale")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "no line of distinct column names"),
        ("a,a\n1,2\n", "no line of distinct column names"),
        ("a,b\n1\n", "row 1 has 1 cells for 2 columns"),
        ('a\n"[1"\n', "not a sweep's table"),
    ],
)
def test_a_file_that_is_no_table_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "table.csv").write_text(text)
    with pytest.raises(UserError, match=problem):
        read_table(tmp_path / "table.csv")


def test_a_missing_table_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.csv: cannot be read"):
        read_table(tmp_path / "none.csv")
