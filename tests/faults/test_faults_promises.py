"""The table of promises: its tests exist, and the documentation has its rows."""

from __future__ import annotations

import re
from pathlib import Path

from support.faults import TESTS, keeps, outcomes, promises

PAGE = TESTS.parent / "docs" / "reliability.md"
REPORT = """<testsuites><testsuite>
<testcase classname="tests.a.test_x" name="test_one"/><testcase classname="tests.a.test_x" name="test_two[p]"/>
<testcase classname="tests.a.test_x" name="test_two[q]"><failure/></testcase>
<testcase classname="tests.a.test_y" name="test_one"><skipped/></testcase></testsuite></testsuites>"""


def test_every_promise_names_tests_that_exist() -> None:
    for row in promises():
        assert row["tests"]
        for test in row["tests"]:
            file, _, name = test.partition("::")
            assert not name or re.search(rf"^def {name}\(", (TESTS / file).read_text(), re.M), test
            assert (TESTS / file).is_file()


def test_the_page_has_the_promises_in_their_order() -> None:
    rows = [
        tuple(cell.strip() for cell in line.split("|")[1:3]) for line in PAGE.read_text().splitlines() if "|" in line
    ]
    assert [row for row in rows if row[0] not in ("What happens", "---")][: len(promises())] == [
        (row["fault"], row["promise"]) for row in promises()
    ]


def test_a_promise_holds_where_all_its_tests_passed(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(REPORT)
    passed = outcomes(report)
    assert passed == {"a/test_x.py::test_one": True, "a/test_x.py::test_two": False, "a/test_y.py::test_one": False}
    held = [
        keeps({"fault": "f", "promise": "p", "tests": [test]}, passed)
        for test in ("a/test_x.py::test_one", "a/test_x.py", "a/test_y.py", "a/test_z.py")
    ]
    assert held == [True, False, False, False]
