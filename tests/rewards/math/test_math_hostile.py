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


def nested(opening: str, inside: str, closing: str, depth: int) -> str:
    return opening * depth + inside + closing * depth


def matrix(size: int) -> str:
    rows = r" \\ ".join(" & ".join(str(row * column) for column in range(size)) for row in range(size))
    return rf"\begin{{pmatrix}} {rows} \end{{pmatrix}}"


HEAVY: Final[dict[str, str]] = {
    "tower": tower("9", 3),
    "tower in braces": "9^{9^{9^{9}}}",
    "tower of ten": tower("2", 10),
    "tower of a thousand": tower("9", 1000),
    "tower in python": tower("9", 3, "**"),
    "tower in parentheses": "(9^9)^(9^9)",
    "tower by division": r"\frac{9^{9^{9}}}{9^{9^{9}}-1}",
    "tower under a root": r"\sqrt{9^{9^9}}",
    "tower in a set": r"\{1, 9^{9^9}\}",
    "tower in a matrix": r"\begin{pmatrix} 1 & 9^{9^9} \\ 0 & 1 \end{pmatrix}",
    "tower in an equation": "x = 9^{9^9}",
    "tower with a unit": r"9^{9^9}\text{ cm}",
    "tower of superscripts": "9⁹⁹⁹⁹⁹⁹⁹⁹⁹",
    "power": "2^{999999999}",
    "power of a decimal": "1.000000001^{999999999}",
    "power of a fraction": r"\left(\frac{3}{7}\right)^{99999999}",
    "negative power": "10^{-999999999}",
    "power of a polynomial": "(x+y+z+w)^{500}",
    "power of powers": "((((((9^9)^9)^9)^9)^9)^9)^9",
    "scientific": "1e999999999",
    "scientific, in latex": r"1 \times 10^{999999999}",
    "scientific, negative": "1e-999999999",
    "factorial": "99999999!",
    "factorial of a factorial": "((9!)!)!",
    "factorial signs": "9!!!!!!!!",
    "a hundred factorials": "3" + "!" * 100,
    "factorials apart": "9! ! !",
    "gamma": r"\Gamma(10^{10})",
    "binomial": r"\binom{10^6}{5 \cdot 10^5}",
    "binomial of digits": r"\binom{99999999}{49999999}",
    "sum": r"\sum_{n=1}^{10^9} \frac{1}{n^2}",
    "sum of sums": r"\sum_{i=1}^{9999}\sum_{j=1}^{9999}\sum_{k=1}^{9999} \sin(ijk)",
    "product": r"\prod_{n=1}^{10^9} n",
    "integral": r"\int_0^1 \sin(\cos(\tan(\exp(x^x)))) dx",
    "integrals": r"\int_0^1 \int_0^1 \int_0^1 e^{xyz} \sqrt{x+y+z} dx dy dz",
    "limit": r"\lim_{x \to 0} \frac{\sin(\tan x) - \tan(\sin x)}{\arcsin(\arctan x) - \arctan(\arcsin x)}",
    "derivative": r"\frac{d}{dx} x^{x^{x^{x^{x}}}}",
    "radicals": r"\sqrt{2+" * 40 + "x" + "}" * 40,
    "radicals of integers": r"\sqrt[7]{10^{400}+7}+\sqrt[11]{10^{401}+9}",
    "denesting": r"\sqrt{" + "+".join(rf"\sqrt{{{k}+\sqrt{{{k + 1}}}}}" for k in range(2, 14)) + "}",
    "root of a huge degree": r"\sqrt[\exp(10^{10})]{2}",
    "root of a tower's degree": r"\sqrt[((e^{9999})^{9999})^{100}]{2}",
    "root of a tiny degree": r"\sqrt[\exp(-10^{8})]{2}",
    "root of a tinier degree": r"\sqrt[\exp(-10^{10})]{2}",
    "root of a fraction's degree": r"\sqrt[10^{-3999}]{\pi}",
    "quotient of half powers": "(2^{990})^{4999.5}/(3^{600})^{4999.5}",
    "product of half powers": r"(\frac{3^{600}}{2^{950}})^{9997.5} \cdot (\frac{7^{340}}{5^{420}})^{9997.5}",
    "sum of half powers": r"(\frac{3^{600}}{2^{950}})^{9997.5} + (\frac{7^{340}}{5^{420}})^{9997.5}",
    "exponential of an exponential": r"\exp(\exp(\exp(100)))",
    "sine of an exponential": r"\sin(\exp(10^{100}))",
    "rounding of an exponential": r"\lfloor \exp(10^{10}) \rfloor",
    "power of a complex number": r"((1+i\pi)^{9998})^{9998}",
    "root of the whole degree": r"\sqrt[99999999]{2}",
    "to factor": str((10**60 + 7) * (10**61 + 3)),
    "a power to factor": f"{10**90 + 289}^{{1/3}}",
    "trigonometry": r"\sin(" * 25 + "x" + ")" * 25,
    "trigonometric identity": "+".join(rf"\sin^{{{k}}}(x)\cos^{{{k}}}(y)" for k in range(2, 20)),
    "trigonometry of a tower": r"\sin(10^{10^{10}})",
    "logarithm of a tower": r"\log_{2}(9^{9^{9}})",
    "long polynomial": "+".join(f"{k}x^{{{k}}}" for k in range(2000)),
    "factors": "".join(f"(x-{k})" for k in range(400)),
    "many symbols": "".join(f"(x_{{{k}}}+y_{{{k}}})" for k in range(60)),
    "continued fraction": r"1+\cfrac{1}{" * 60 + "x" + "}" * 60,
    "equations": ", ".join(f"x_{{{k}}}^{{7}}+x+{k}=0" for k in range(40)),
    "inequalities": " < ".join(f"x^{{{k}}}+{k}" for k in range(40)),
    "intervals": r" \cup ".join(f"(\\frac{{{k}}}{{7}}, {k}+\\sqrt{{2}})" for k in range(200)),
    "symbolic intervals": r" \cup ".join(f"(x_{{{k}}}, y_{{{k}}})" for k in range(12)),
    "matrix": matrix(60),
    "power of a matrix": rf"{matrix(8)}^{{999999}}",
    "inverse of a matrix": rf"{matrix(12)}^{{-1}}",
    "nested matrices": nested(r"\begin{pmatrix}", "1", r"\end{pmatrix}", 30),
    "guesses": ", ".join(str(k) for k in range(100_000)),
    "guesses or": r" \text{ or } ".join(str(k) for k in range(2000)),
    "plus or minus": r"\pm 1" * 40,
    "sum of ones": "+".join("1" * 30),
    "sum of many ones": "+".join(["1"] * 5000),
    "signs": "-" * 1000 + "31.5",
    "digits": "9" * 1_000_000,
    "digits after the point": "0." + "3" * 1_000_000,
    "digits of a fraction": r"\frac{" + "1" * 100_000 + "}{" + "3" * 100_000 + "}",
    "digits beyond int()": "1" * 5000,
    "zeros": "0" * 1_000_000 + "1",
    "letters": "a" * 1_000_000,
    "words": "the answer is not this " * 50_000,
    "spaces": "1" + " " * 1_000_000 + "2",
    "commas": "," * 1_000_000,
    "thousands": "1" + ",000" * 200_000,
    "fractions": r"\frac" * 100_000,
    "nested fractions": nested(r"\frac{1}{", "2", "}", 10_000),
    "nested roots": nested(r"\sqrt{", "2", "}", 100_000),
    "nested braces": nested("{", "7", "}", 100_000),
    "nested parentheses": nested("(", "7", ")", 100_000),
    "thirty parentheses": nested("(", "7+x", ")", 30),
    "nested brackets": nested("[", "7", "]", 100_000),
    "nested sets": nested(r"\{", "7", r"\}", 100_000),
    "nested left and right": nested(r"\left(", "7", r"\right)", 30_000),
    "nested text": nested(r"\text{", "7", "}", 30_000),
    "nested bars": "|" * 10_000 + "7" + "|" * 10_000,
    "nested exponents": nested("x^{", "7", "}", 30_000),
    "nested subscripts": nested("x_{", "7", "}", 30_000),
    "overlines": r"0.\overline{" + "7" * 100_000 + "}",
    "repeating decimal": "0." + "7" * 300 + r"\overline{" + "13" * 300 + "}",
    "dollars": "$" * 100_000,
    "backslashes": "\\\\" * 200_000,
    "percent": "7" + "%" * 100_000,
    "degrees": "7" + r"^\circ" * 50_000,
    "units": "7" + r"\text{ m}" * 30_000,
    "base": "7_" + "{9}" * 10_000,
    "huge base": "7_{" + "9" * 4000 + "}",
    "clock": ":".join(["12"] * 50_000),
    "equals": "=".join(["7"] * 50_000),
    "ligatures": "\ufdfa" * 100_000,
    "combining marks": "a" + "\u0301\u0316" * 200_000,
    "vulgar fractions": "½" * 100_000,
    "superscripts": "7" + "⁹" * 100_000,
    "zero width": "\u200b" * 1_000_000 + "7",
    "directions": "\u202e" * 100_000 + "13",
    "tags": "".join(chr(0xE0000 + ord(c)) for c in "31") * 10_000,
    "bengali and tamil": "৪௧௦௦",
    "digits that int() refuses": "²³",
    "circled": "㉛①",
    "roman": "ⅩⅩⅩⅠ",
    "more halves": "½½½",
    "null": "\x00" * 1000 + "7",
    "control": "".join(chr(k) for k in range(32)) * 100,
    "surrogate": "\ud800",
    "surrogates": "\udc80\ud83d" * 1000,
    "emoji": "👨\u200d👩\u200d👧" * 10_000,
    "private use": "\ue000\uf8ff" * 1000,
    "not a character": "\uffff\ufffe",
    "for regexes": "1" * 40 + "!",
    "for nested quantifiers": "a" * 60 + "\\" * 60 + "{" + "," * 60,
    "alternating": "{,}" * 50_000,
    "frac pieces": r"\frac 1" * 50_000,
    "sqrt pieces": r"\sqrt2" * 50_000,
    "environments": r"\begin{matrix}" * 30_000,
    "environments within": r"\begin{a}\begin{b}" * 20_000 + r"\end{a}\end{b}" * 20_000,
    "macros": r"\def\a{\a\a}\a",
    "macros that multiply": r"\newcommand{\b}[1]{#1#1}" + r"\b{" * 30 + "9" + "}" * 30,
    "undefined commands": "".join(rf"\cmd{chr(97 + k % 26)}" for k in range(30_000)),
    "format string": "{0.__class__.__mro__}" * 100,
    "percent format": "%s%n%x" * 1000,
}

# Whole transcripts: nothing is put into a box for them.
TEXTS: Final[dict[str, str]] = {
    "boxes that stay open": r"\boxed{" * 100_000,
    "boxes in boxes": nested(r"\boxed{", "7", "}", 100_000),
    "many boxes": r"\boxed{7} " * 100_000,
    "many boxes, the last one open": r"\boxed{7} " * 100_000 + r"\boxed{31",
    "open boxes, then a closed one": r"\boxed{" * 100_000 + r"\boxed{7}",
    "braces": "{" * 1_000_000,
    "closing braces": "}" * 1_000_000,
    "box of braces": r"\boxed{" + "{}" * 500_000 + "}",
    "backslashes before a box": "\\" * 500_001 + "boxed{7}}",
    "long box": r"\boxed{" + "7" * 1_000_000 + "}",
    "long text": "so the next step is clear, and " * 30_000 + r"\boxed{7}",
    "thinking": "<think>" * 100_000 + r"\boxed{31}",
    "thinking ends": "</think>" * 100_000 + r"\boxed{7}",
    "thinking in turns": "<think></think>" * 50_000 + r"<think>\boxed{31}",
    "answers open": "<answer>" * 100_000 + "31",
    "answers closed": "</answer>" * 100_000,
    "answers in answers": "<answer>" * 50_000 + "7" + "</answer>" * 50_000,
    "answers": "<answer>7</answer>" * 50_000,
    "half tags": "<" * 500_000 + "answer>31",
    "combining marks outside": "a" + "\u0301\u0316" * 200_000 + r"\boxed{7}",
    "null bytes outside": "\x00" * 1_000_000 + r"\boxed{7}",
    "surrogates outside": "\ud800" * 100_000 + r"\boxed{7}",
    "lines": "\n" * 1_000_000 + r"\boxed{7}",
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
    [("{}", 200_000), (r"\boxed{{{}}}", 200_000), ("<answer>{}</answer>", 200_000), (r"\boxed{{1{}2}}", 240)],
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
