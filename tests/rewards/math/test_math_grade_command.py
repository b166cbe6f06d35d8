"""`flatpeak grade`: rows in, verdicts out."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from flatpeak.cli.evaluate import grade
from flatpeak.errors import UserError
from flatpeak.rewards.math.grader import MathGrader

app = typer.Typer()
app.command("grade")(grade)


def rows(directory: Path, *pairs: tuple[Any, Any]) -> str:
    file = directory / "answers.jsonl"
    file.write_text("".join(json.dumps({"answer": answer, "gold": gold}) + "\n" for answer, gold in pairs))
    return str(file)


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def test_json_is_one_object_with_the_verdicts_in_order(tmp_path: Path) -> None:
    slow = r"\boxed{\sum_{n=1}^{10^9} \frac{1}{n^2}}"
    file = rows(
        tmp_path, (r"\boxed{\frac12}", "0.5"), ("15 km", r"15\text{ m}"), (slow, "2"), ("#### 18", "#### 18"), (5, 5.0)
    )
    printed = run(file, "--task", "math", "--json", "--timeout", "0.3")
    assert printed.count("\n") == 1
    assert json.loads(printed) == {
        "verdicts": [True, False, "failed", True, True],
        "correct": 3,
        "failed": 1,
        "total": 5,
    }


def test_the_table_counts_and_shows_what_is_not_correct(tmp_path: Path) -> None:
    file = rows(tmp_path, ("5", "5"), (r"so \boxed{6}", "7"))
    assert run(file) == f"1 of 2 correct (50.0%), 1 wrong, 0 failed\nwrong    {file} line 2: so \\boxed{{6}} for 7\n"
    file = rows(tmp_path, *[("5", "6")] * 25)
    lines = run(file).splitlines()
    assert len(lines) == 1 + 20 + 1
    assert lines[-1] == "and 5 more; --json has every verdict"


def test_gsm8k_compares_numbers_by_its_own_rules(tmp_path: Path) -> None:
    pairs = [
        ("He has 5 + 13 = 18.\n#### $18.00", "5 + 13 = <<5+13=18>>18\n#### 18"),
        ("18", "18"),
        (r"\boxed{1,000}", "1000"),
        ("<answer>18 dollars</answer>", "18"),
        (r"\boxed{\frac{36}{2}}", "18"),
        ("It is 18.", "18"),
        ("#### 19", "18"),
    ]
    printed = json.loads(run(rows(tmp_path, *pairs), "--task", "gsm8k", "--json"))
    assert printed["verdicts"] == [True, True, True, True, True, False, False]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"answer": "5", "gold": "5"}\n{"answer": "5"}\n', "line 2: no text in column 'gold'"),
        ('{"answer": null, "gold": "5"}\n', "line 1: no text in column 'answer'"),
        ('{"answer": "5", "gold": "5"}\nnonsense\n', "line 2: not valid JSON"),
        ("[1]\n", "line 1: expected an object"),
        ("\n", "has no rows"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "answers.jsonl"
    file.write_text(content)
    with pytest.raises(UserError, match=message):
        run(str(file), "--json")


def test_bad_options_are_named(tmp_path: Path) -> None:
    file = rows(tmp_path, ("5", "five"))
    with pytest.raises(UserError, match="line 1: the gold 'five' is not a number"):
        run(file, "--task", "gsm8k")
    with pytest.raises(UserError, match="--task poetry: choose one of math, gsm8k"):
        run(file, "--task", "poetry")
    with pytest.raises(UserError, match=r"--timeout 0\.0: give seconds"):
        run(file, "--timeout", "0")
    with pytest.raises(UserError, match=r"missing\.jsonl is not a file"):
        run(str(tmp_path / "missing.jsonl"))


def test_the_command_loads_no_torch(tmp_path: Path) -> None:
    file = rows(tmp_path, (r"\boxed{x+1}", "1+x"))
    code = (
        "import sys\nfrom flatpeak.cli.evaluate import grade\n"
        "grade(sys.argv[1], task='math', as_json=True, timeout=2.0)\nprint('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, file], capture_output=True, text=True, check=True)
    assert done.stdout == '{"verdicts": [true], "correct": 1, "failed": 0, "total": 1}\nFalse\n'


def test_the_examples_of_the_page_are_graded_as_it_says() -> None:
    page = (Path(__file__).parents[3] / "docs" / "grading.md").read_text(encoding="utf-8")
    examples = re.findall(r"^\| `(.*)` \| `(.*)` \| (true|false) \|$", page, re.MULTILINE)
    assert len(examples) >= 20
    with MathGrader(extraction="any") as grader:
        verdicts = grader.grade([(answer, gold) for answer, gold, _ in examples])
    assert verdicts == [verdict == "true" for *_, verdict in examples]
