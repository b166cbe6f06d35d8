"""What a policy can write to hang, crash, bloat or fool the grader: it costs its time limit once, and nothing else."""

from __future__ import annotations

import os
import random
import resource
import time
from pathlib import Path
from typing import Final

import pytest

from support.graded_cases import CASES, grade
from support.tables import read_tables

TABLES = read_tables(__file__)

LIMIT: Final = 0.5
"""Seconds for one pair."""
BUSY: Final = min(4.0, max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)))
"""How many times slower than by itself this process runs beside what else there is."""
SLACK: Final = 3.0 * BUSY
"""Seconds beyond the limit: one for the kill, the rest for a worker that starts again."""
WRONG: Final = "31"
"""The gold answer that none of the hostile ones is equal to."""


def boxed(answer: str) -> str:
    return rf"So it is $\boxed{{{answer}}}$."


def tower(base: str, height: int, operator: str = "^") -> str:
    return operator.join([base] * height)


def matrix(size: int) -> str:
    rows = r" \\ ".join(" & ".join(str(row * column) for column in range(size)) for row in range(size))
    return rf"\begin{{pmatrix}} {rows} \end{{pmatrix}}"


def written(table: str) -> dict[str, str]:
    """The texts of a table, with the repeated parts written out."""
    return {
        name: "".join(part if isinstance(part, str) else part[0] * part[1] for part in parts)
        for name, parts in TABLES[table].items()
    }


HEAVY: Final[dict[str, str]] = {
    **written("heavy"),
    "tower": tower("9", 3),
    "tower of ten": tower("2", 10),
    "tower of a thousand": tower("9", 1000),
    "tower in python": tower("9", 3, "**"),
    "denesting": r"\sqrt{" + "+".join(rf"\sqrt{{{k}+\sqrt{{{k + 1}}}}}" for k in range(2, 14)) + "}",
    "to factor": str((10**60 + 7) * (10**61 + 3)),
    "a power to factor": f"{10**90 + 289}^{{1/3}}",
    "trigonometric identity": "+".join(rf"\sin^{{{k}}}(x)\cos^{{{k}}}(y)" for k in range(2, 20)),
    "long polynomial": "+".join(f"{k}x^{{{k}}}" for k in range(2000)),
    "factors": "".join(f"(x-{k})" for k in range(400)),
    "many symbols": "".join(f"(x_{{{k}}}+y_{{{k}}})" for k in range(60)),
    "equations": ", ".join(f"x_{{{k}}}^{{7}}+x+{k}=0" for k in range(40)),
    "inequalities": " < ".join(f"x^{{{k}}}+{k}" for k in range(40)),
    "intervals": r" \cup ".join(f"(\\frac{{{k}}}{{7}}, {k}+\\sqrt{{2}})" for k in range(200)),
    "symbolic intervals": r" \cup ".join(f"(x_{{{k}}}, y_{{{k}}})" for k in range(12)),
    "matrix": matrix(60),
    "power of a matrix": rf"{matrix(8)}^{{999999}}",
    "inverse of a matrix": rf"{matrix(12)}^{{-1}}",
    "guesses": ", ".join(str(k) for k in range(100_000)),
    "guesses or": r" \text{ or } ".join(str(k) for k in range(2000)),
    "sum of ones": "+".join("1" * 30),
    "sum of many ones": "+".join(["1"] * 5000),
    "clock": ":".join(["12"] * 50_000),
    "equals": "=".join(["7"] * 50_000),
    "tags": "".join(chr(0xE0000 + ord(c)) for c in "31") * 10_000,
    "null": "\x00" * 1000 + "7",
    "control": "".join(chr(k) for k in range(32)) * 100,
    "surrogate": "\ud800",
    "surrogates": "\udc80\ud83d" * 1000,
    "not a character": "\uffff\ufffe",
    "undefined commands": "".join(rf"\cmd{chr(97 + k % 26)}" for k in range(30_000)),
}

# Whole transcripts: nothing is put into a box for them.
TEXTS: Final[dict[str, str]] = {
    **written("texts"),
    "null bytes outside": "\x00" * 1_000_000 + r"\boxed{7}",
    "surrogates outside": "\ud800" * 100_000 + r"\boxed{7}",
}

# Each harmless, each for a different rule or for the fallback.
HARMLESS: Final = tuple(CASES[index] for index in range(0, len(CASES), 19))


def hostile() -> list[tuple[str, str]]:
    return [*((name, boxed(text)) for name, text in HEAVY.items()), *TEXTS.items()]


@pytest.mark.parametrize("name", [*HEAVY, *TEXTS])
def test_a_hostile_answer_is_never_right_and_costs_no_more_than_the_limit(name: str) -> None:
    text = dict(hostile())[name]
    started = time.monotonic()
    (verdict,) = grade([(text, WRONG)], limit=LIMIT)
    assert verdict in (False, None)
    assert time.monotonic() - started < LIMIT + SLACK


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        (r"\ln(1+i\exp(-10^{9}))", "0"),
        (r"\ln(1+i\exp(-10^{10}))", "12345678+x"),
        (r"(1+i \exp(-10^{9}))^{99}", "1"),
        (r"(1+i\exp(-10^9))^{x}", "1"),
        (r"\ln((0.5+y)^{\sech(1e9)})", "0"),
        (r"y = \sqrt{\log_{1000000007}(((0.5+y))^{\sech(1e9)})}", "0"),
        ("+".join(rf"\ln(1+i/{k}e9999)" for k in range(1, 12)), "0"),
        (r"|1+i\exp(-10^{9})|", "1"),
        (r"\cos(\exp(-10^{9}))", "1"),
        (r"1+\exp(-10^{9})", "1"),
        (r"\sqrt[\exp(10^{9})]{2}", "1"),
        (r"\frac{9^{9^{9}}}{9^{9^{9}}+1}", "1"),
        ("1.000000001^{999999999}", "e"),
    ],
)
def test_a_hostile_answer_next_to_the_gold_answer_costs_no_more_than_the_limit(answer: str, gold: str) -> None:
    """Rounded they are equal, so they are not told apart by a first look."""
    started = time.monotonic()
    assert grade([(boxed(answer), gold)], limit=LIMIT)[0] in (False, None)
    assert time.monotonic() - started < LIMIT + SLACK


@pytest.mark.slow
def test_hostile_answers_change_no_other_verdict_and_leave_no_memory_behind() -> None:
    attacks = [(text, WRONG) for _, text in hostile()[::2]]
    pairs = [*attacks, *((case.answer, case.gold) for case in HARMLESS)]
    order = random.Random(0).sample(range(len(pairs)), len(pairs))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    graded = grade([pairs[index] for index in order], limit=2.0 * BUSY)
    verdicts = dict(zip(order, graded, strict=True))
    assert True not in [verdicts[index] for index in range(len(attacks))]
    assert [verdicts[len(attacks) + index] for index in range(len(HARMLESS))] == [case.correct for case in HARMLESS]
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before  # KiB
    assert grown < 200 * 1024


def test_an_answer_after_a_hostile_one_is_still_graded() -> None:
    attacks = ["tower", "((9!)!)!", "9^{9^{9^{9}}}", "radicals", "integrals", "denesting"]
    pairs = [pair for name in attacks for pair in ((boxed(HEAVY.get(name, name)), "x"), (boxed("(x+1)^2"), "x^2+2x+1"))]
    verdicts = grade(pairs, limit=2.0 * BUSY)
    assert verdicts[1::2] == [True] * len(attacks)
    assert True not in verdicts[::2]


@pytest.mark.parametrize("gold", ["5", "x", "9^{9^9}", "((9!)!)!", "{" * 1000, "\x00", "\ud800", "1" * 100_000, "²"])
def test_a_hostile_gold_answer_is_not_equal_to_a_harmless_answer(gold: str) -> None:
    assert grade([(boxed("7"), gold)], limit=LIMIT)[0] in (False, None)


@pytest.mark.parametrize(
    "answer", ["", " ", r"\boxed{}", r"\boxed{ }", r"\boxed{\text{}}", r"\boxed{\,}", r"\boxed{$$}"]
)
@pytest.mark.parametrize("gold", ["5", "0"])
def test_an_empty_answer_is_wrong(answer: str, gold: str) -> None:
    assert grade([(answer, gold)], limit=LIMIT) == [False]


UNITS: Final = (
    "{", "}", "{}", "(", ")", "[", "\\", "\\\\", "$", ",", "1,", ",000", " ", "\n", "-", "+", "1+", "^", "^{", "_",
    "_{", "!", "%", "=", "x=", "|", ":", "1:", "0", "9", ".", "1.", "a", "a ", "½", "²", "√", "√(", "\u200b",
    "\u0301\u0316", "\ufdfa", r"\frac", r"\frac1", r"\frac{", r"\frac{1}{", r"\sqrt", r"\sqrt{", r"\sqrt[",
    r"\text{", r"\text{a}", r"\mathrm{", r"\left(", r"\right)", r"\left", r"\!", r"\,", r"\;", "{,}", r"\boxed{",
    r"\boxed", r"\boxed{1}", r"\begin{pmatrix}", r"\end{pmatrix}", r"\begin{pmatrix}1", r"\cup", r"\cup(1,2)",
    r"\pm", r"\pm 1", r"\circ", r"^\circ", r"^{\circ}", r"\cdot", r"\times", r"\overline{", r"0.\overline{1}",
    r"\$", r"\%", r"\text{ and }", " or ", " and ", r"\{", r"\}", r"\{1,", "(1,2),", "<think>", "</think>",
    "<answer>", "</answer>", "<answer>1</answer>", "<", "1 1/2 ", "1/2 ", "1/", "e", "1e", "1e5", " cm", " p.m.",
    r"\Rightarrow", r"x=1\Rightarrow ", r"\color{red}", r"\color{red}{1}", "]", "[1,", "]1,2", r"\text{m}", "B) ",
    r"\cdot\text{s}", r"\text{s}^{-1}", r"\Omega", r"\mu", "one ", "hundred ", "and ", "since ", " because x", "(B)",
    "the answer is ", "答案", "5个", "万", "或", "。", r"\begin{aligned}", r"\begin{aligned} &= ", r"0.3\ldots", "1=",
    "3...", "0.333", "1.5x10^", "(1=", r"(1\Rightarrow ", r"\{x|", "per ", "square ", r"1\approx ", "x<1 and ",
    r"[1,2]\cup", r"\infty", r"\infty-", "Rs. ", "$1 per ",
    "**", "//", "_1", "i", r"\ln", r"\sin(", r"\log_", "&", "&\\\\",
)  # fmt: skip


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize(
    ("frame", "length"),
    [
        (r"\boxed{{{}}}", 200_000),
        (r"\boxed{{1{}2}}", 240),
        pytest.param("{}", 200_000, marks=pytest.mark.slow),
        pytest.param("<answer>{}</answer>", 200_000, marks=pytest.mark.slow),
    ],
)
def test_a_pattern_repeated_at_any_length_is_read_within_the_limit(unit: str, frame: str, length: int) -> None:
    """What reads 200,000 characters in quadratic time needs far longer; 240 get past every cap on length."""
    text = frame.format(unit * (length // len(unit)))
    started = time.monotonic()
    assert grade([(text, WRONG)], limit=LIMIT)[0] in (False, None)
    assert time.monotonic() - started < LIMIT + SLACK


@pytest.mark.parametrize(
    "payload",
    [
        "__import__('pathlib').Path({path!r}).touch()",
        "eval(\"__import__('pathlib').Path({path!r}).touch()\")",
        "exec(\"open({path!r},'w')\")",
        "open({path!r},'w')",
        "[open({path!r},'w') for _ in (1,)]",
        "(lambda: open({path!r},'w'))()",
        "x, open({path!r},'w')",
        "\\text{{__import__('pathlib').Path({path!r}).touch()}}",
        "f'{{open({path!r},chr(119))}}'",
        "().__class__.__base__.__subclasses__()[0](open({path!r},'w'))",
        "1 if open({path!r},'w') else 2",
        "\\operatorname{{open}}({path!r},'w')",
        "Symbol('x').evalf(subs=open({path!r},'w'))",
        "$(touch {path}) `touch {path}` ; touch {path}",
        "\\immediate\\write18{{touch {path}}}",
        'c__builtin__\neval\n(S\'open("{path}","w")\'\ntR.',
    ],
)
def test_code_in_an_answer_or_in_a_gold_answer_is_not_run(payload: str, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    code = payload.format(path=str(canary))
    texts = [boxed(code), f"<think>a</think> <answer>{code}</answer>", code]
    verdicts = grade([*((text, WRONG) for text in texts), (boxed("7"), code)], limit=2.0)
    assert True not in verdicts
    assert not canary.exists()


NOTHING: Final = (
    "nan", "zoo", "oo", "None", "0/0", r"\frac{0}{0}", r"\infty-\infty", "q=q", "=", ",", ";", ":", ".",
    "()", "[]", "(,)", r"\{,\}", "^", "_", "+", r"\pm", r"\ldots", "...", r"\text{}", r"\text{any}", r"\forall x", "||",
    r"\sqrt{}", r"\frac{}{}", r"\begin{pmatrix}\end{pmatrix}", r"\cup", "&", r"\\", "#", "$", "%", r"\circ", "<", "!",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("answer", NOTHING)
def test_no_answer_without_a_value_is_right_for_any_gold(answer: str) -> None:
    """A universal answer is what a policy finds first."""
    golds = sorted({case.gold for case in CASES})[::3]
    verdicts = grade([(boxed(answer), gold) for gold in golds])
    assert [gold for gold, verdict in zip(golds, verdicts, strict=True) if verdict] == []
