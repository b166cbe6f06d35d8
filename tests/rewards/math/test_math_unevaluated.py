"""`evaluated: true`: answers that leave operations, or copy the question, beside those that only spell a result."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter
from test_math_grade_command import rows, run

from flatpeak.config.load import load_recipe
from flatpeak.rewards.config import RewardConfig
from flatpeak.rewards.math.extract import extract_answer, gold_answer
from flatpeak.rewards.math.unevaluated import is_evaluated, only_evaluated
from flatpeak.rewards.math_reward import question_only_reward, r1_zero_reward
from flatpeak.rewards.reward_set import build_reward
from flatpeak.types import Completion, Group, Prompt
from support.math_cases import CASES, grade

RESTATED = [
    (r"\binom84", "70"),
    (r"\binom{8}{4}", "70"),
    (r"\sin 60^\circ", r"\frac{\sqrt3}{2}"),
    (r"\log_2 8", "3"),
    (r"\lfloor 3.2\rfloor", "3"),
    ("|7-24i|", "25"),
    (r"37\cdot43", "1591"),
    (r"37 \times 43", "1591"),
    ("37(43)", "1591"),
    ("(2x+3)(x-5)", "2x^2-7x-15"),
    (r"\sum_{k=1}^{10}k", "55"),
    (r"\int_0^1 x\,dx", r"\frac12"),
    (r"\gcd(12,18)", "6"),
    (r"\max(3,5)", "5"),
    (r"17 \bmod 5", "2"),
    ("12+34", "46"),
    ("2^{10}", "1024"),
    ("5!", "120"),
    (r"\frac{10!}{8!}", "90"),
    (r"\prod_{k=1}^{4} k", "24"),
    (r"\lim_{x\to0}\frac{\sin x}{x}", "1"),
    ("(3+4i)(1-i)", "7+i"),
    ("i^{22}", "-1"),
]
"""What a question asks for, taken from its statement."""

LEFT = [
    *RESTATED,
    (r"\frac12\cdot\frac13", r"\frac16"),
    (r"\frac{1/2}{3/4}", r"\frac23"),
    (r"\frac{1\frac12}{2\frac14}", r"\frac23"),
    (r"3\frac12/2", r"\frac74"),
    (r"\frac{5}{1\frac12}", r"\frac{10}{3}"),
    (r"\frac12\cdot 6", "3"),
    (r"2\cdot3+1", "7"),
    (r"1-\frac13", r"\frac23"),
    ("1+1+1+1+1", "5"),
    (r"2\sqrt3+3\sqrt3", r"5\sqrt3"),
    ("3x+2x", "5x"),
    ("4x-3+8", "4x+5"),
    (r"\sqrt{3^2+4^2}", "5"),
    (r"\sqrt{36+64}", "10"),
    ("8^{2/3}", "4"),
    ("16^{1/2}", "4"),
    (r"\left(\frac23\right)^2", r"\frac49"),
    ("2^{-3}", r"\frac18"),
    ("(-5)^2", "25"),
    (r"(1+\sqrt2)^2", r"3+2\sqrt2"),
    (r"(2+\sqrt3)(2-\sqrt3)", "1"),
    (r"\sqrt2^4", "4"),
    (r"\sqrt2\cdot\sqrt2", "2"),
    (r"i\cdot i", "-1"),
    ("(x+1)^2", "x^2+2x+1"),
    ("x(x+1)(x+2)", "x^3+3x^2+2x"),
    ("f(x) = (x-1)(x+1)", "x^2-1"),
    (r"\frac{(x-1)(x+1)}{x-1}", "x+1"),
    (r"e^{i\pi}", "-1"),
    (r"e^{\ln 5}", "5"),
    (r"\ln e^2", "2"),
    (r"\arctan 1", r"\frac{\pi}{4}"),
    (r"\sin^2 x + \cos^2 x", "1"),
    ("|-5|", "5"),
    (r"|1-\sqrt2|", r"\sqrt2-1"),
    (r"x = 2^3", "8"),
    (r"8 = 2^3", "8"),
    (r"(2+3, 4)", "(5,4)"),
    (r"2^3, 3^2", "8, 9"),
    (r"\begin{pmatrix} 2\cdot3 \\ 1 \end{pmatrix}", r"\begin{pmatrix} 6 \\ 1 \end{pmatrix}"),
    (r"[1+1, 5)", "[2,5)"),
    (r"x \le 2+3", r"x \le 5"),
    (r"(2\cdot 3) : 5", "6:5"),
    (r"100\cdot\frac12\%", r"50\%"),
    (r"5\cdot3\text{ cm}", r"15\text{ cm}"),
    (r"3\cdot10^2\cdot5", "1500"),
    (r"10^2\cdot10^3", "100000"),
    (r"2^5\cdot2^5", "2^{10}"),
    (r"2\cdot2^{9}", "2^{10}"),
    (r"\log_2 6+\sin\frac{\pi}{2}", r"1+\log_2 6"),
    (r"\frac{\binom{5}{2}}{2^5}", r"\frac{5}{16}"),
    (r"[1,3]\cap[2,4]", "[2,3]"),
    (r"\sum_{k=1}^{10} k = 54+1", "55"),
    (r"2(3+4)", "14"),
    (r"\frac{14}{2}", "7"),
    ("-144/12", "-12"),
    (r"\$36/2", "18"),
    ("4.5/1.5", "3"),
    ("1/(1/5)", "5"),
    (r"\left(\frac42, 3\right)", "(2,3)"),
    (r"\sqrt{144}", "12"),
    (r"\sqrt[3]{8}", "2"),
    (r"\sqrt{\frac14}", r"\frac12"),
]

WRITTEN = [
    # Numbers, fractions, decimals, signs.
    ("46", "46"),
    ("-7", "-7"),
    ("1,591", "1591"),
    (r"1{,}591", "1591"),
    ("1591.0", "1591"),
    (r"\frac{3}{4}", "0.75"),
    ("0.75", r"\frac34"),
    ("75/100", r"\frac34"),
    (r"\frac{6}{8}", r"\frac34"),
    ("5/1", "5"),
    ("25/2", "12.5"),
    (r"-\frac{3}{4}", r"\frac{-3}{4}"),
    (r"\dfrac{-3}{-4}", r"\frac34"),
    (r"\frac{1.5}{2}", "0.75"),
    (r"3\frac12", r"\frac72"),
    ("3 1/2", "3.5"),
    (r"\frac72", r"3\frac12"),
    (r"-1\frac{3}{4}", "-1.75"),
    (r"0.\overline{3}", r"\frac13"),
    ("½", "0.5"),
    ("--5", "5"),
    ("+5", "5"),
    # Scientific notation.
    (r"1.5\times10^3", "1500"),
    (r"1.5 \cdot 10^{3}", "1500"),
    (r"-2.5\times10^{-4}", "-0.00025"),
    (r"15\times 10^{2}", "1500"),
    ("1.5e3", "1500"),
    ("10^6", "1000000"),
    ("10^{-3}", "0.001"),
    (r"6\times10^{23}", r"6.0\times10^{23}"),
    (r"3\times10^8\text{ m/s}", "300000000"),
    # Units, currency, percent, degrees, magnitudes.
    ("15 cm", r"15\text{ cm}"),
    (r"15\text{ cm}", "15"),
    (r"15\text{ cm}^2", "15"),
    (r"\$18", "18"),
    (r"\$18.00", "18"),
    ("18 dollars", "18"),
    (r"60^\circ", "60"),
    ("60 degrees", r"60^\circ"),
    (r"50\%", "50"),
    ("0.5", r"50\%"),
    ("5 million", "5000000"),
    (r"2.5\text{ million}", "2500000"),
    ("2 dozen", "24"),
    # Radicals.
    (r"\sqrt2", r"\sqrt{2}"),
    (r"2\sqrt{3}", r"\sqrt{12}"),
    (r"\sqrt{12}", r"2\sqrt{3}"),
    (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt2}"),
    (r"\frac{1}{\sqrt{2}}", r"\frac{\sqrt2}{2}"),
    (r"\sqrt{\frac{1}{2}}", r"\frac{\sqrt2}{2}"),
    (r"\sqrt2\sqrt3", r"\sqrt6"),
    (r"2\sqrt{2}\cdot\sqrt{3}", r"2\sqrt6"),
    (r"\sqrt[3]{16}", r"2\sqrt[3]{2}"),
    ("2^{1/3}", r"\sqrt[3]{2}"),
    (r"2^{\frac{3}{2}}", r"2\sqrt2"),
    (r"\sqrt{3+2\sqrt2}", r"1+\sqrt2"),
    (r"\frac{-1+\sqrt5}{2}", r"\frac{\sqrt5-1}{2}"),
    (r"\frac{-1}{2}+\frac{\sqrt5}{2}", r"\frac{\sqrt5-1}{2}"),
    (r"\frac{3}{2\sqrt2}", r"\frac{3\sqrt2}{4}"),
    (r"\frac{1}{2-\sqrt3}", r"2+\sqrt3"),
    (r"\frac{4\sqrt{3}}{3}", r"\frac{4}{\sqrt3}"),
    (r"\frac12\sqrt3", r"\frac{\sqrt3}{2}"),
    # A common factor.
    (r"4(2+\sqrt3)", r"8+4\sqrt3"),
    (r"8+4\sqrt3", r"4(2+\sqrt3)"),
    (r"\sqrt2(\sqrt3-1)", r"\sqrt6-\sqrt2"),
    (r"\frac{\sqrt6+\sqrt2}{4}", r"\frac{\sqrt2(\sqrt3+1)}{4}"),
    ("2(x+3)", "2x+6"),
    ("x(x+1)", "x^2+x"),
    ("-2x(x-4)", "8x-2x^2"),
    (r"\frac{n(n+1)}{2}", r"\frac{n^2+n}{2}"),
    (r"\pi(4+\sqrt2)", r"4\pi+\pi\sqrt2"),
    (r"3\left(1-\frac{1}{e}\right)", r"3-\frac3e"),
    # pi, e, i.
    (r"9\pi", r"9 \pi"),
    (r"\frac{\pi}{4}", r"\frac14\pi"),
    (r"\frac{4}{3}\pi", r"\frac{4\pi}{3}"),
    (r"\pi^2", r"\pi\cdot\pi"),
    (r"\frac{\pi^2}{6}", r"\frac{1}{6}\pi^2"),
    ("e^2", r"\exp(2)"),
    (r"\exp(2)", "e^2"),
    ("e^{-1}", r"\frac{1}{e}"),
    (r"\frac{1}{e^2}", "e^{-2}"),
    (r"\sqrt{e}", "e^{1/2}"),
    ("7+i", "i+7"),
    ("3-4i", "-4i+3"),
    (r"\frac{1+i}{2}", r"\frac12+\frac12 i"),
    (r"\frac{1}{2} + \frac{\sqrt{3}}{2}i", r"\frac{1+i\sqrt3}{2}"),
    # Letters.
    ("2x^2-7x-15", "2x^2 - 7x - 15"),
    ("-15-7x+2x^2", "2x^2-7x-15"),
    ("x^2+2x+1", "(x+1)^2"),
    ("(x+1)(x+1)", "(x+1)^2"),
    ("(1+x)^2", "(x+1)^2"),
    ("(x-5)(2x+3)", "(2x+3)(x-5)"),
    (r"\frac{1}{2}x+3", r"\frac{x}{2}+3"),
    ("x/2+3", r"\frac{x}{2}+3"),
    (r"\frac{x+1}{x-1}", r"\frac{1+x}{x-1}"),
    (r"\frac{3}{(x-1)(x+2)}", r"\frac{3}{x^2+x-2}"),
    (r"\frac{(x+1)(x+2)}{x+3}", r"\frac{x^2+3x+2}{x+3}"),
    (r"\frac{1}{(a+b)^2}", r"\frac{1}{a^2+2ab+b^2}"),
    (r"x^{-1}", r"\frac1x"),
    (r"\sqrt{x}", "x^{1/2}"),
    (r"|x|", r"|x|"),
    (r"|x-1|", r"|1-x|"),
    ("xy^2", "y^2x"),
    ("a^2b", "ba^2"),
    (r"(\frac{x}{2})^2", r"\frac{x^2}{4}"),
    ("2^{n+1}", r"2\cdot2^n"),
    ("4^{n}", "2^{2n}"),
    (r"\frac{1}{2^n}", "2^{-n}"),
    ("ab+ac", "a(b+c)"),
    # Functions that the gold has too.
    (r"\sin 20^\circ", r"\cos 70^\circ"),
    (r"2\sin x\cos x", r"\sin 2x"),
    (r"\frac{\sin x}{\cos x}", r"\tan x"),
    (r"\ln 8", r"3\ln 2"),
    (r"1+\log_2 3", r"\log_2 6"),
    (r"\frac{\ln 3}{\ln 2}", r"\log_2 3"),
    (r"\arctan 2", r"\tan^{-1} 2"),
    (r"\pi-\arccos\frac13", r"\arccos(-\frac13)"),
    (r"\frac{1}{2004!}", r"\frac{1}{2004!}"),
    (r"\binom{10}{3}", r"\frac{10!}{3!7!}"),
    ("2^{10}-1", "2^{10} - 1"),
    ("-1+2^{10}", "2^{10} - 1"),
    ("2(2^9-1)", "2^{10} - 2"),
    ("4^{5}", "2^{10}"),
    (r"3\cdot3\cdot223", r"3^2 \cdot 223"),
    # Worked out at the end of a chain.
    ("x = 5", "5"),
    ("12+34=46", "46"),
    (r"37\cdot43 = 1591", "1591"),
    (r"\sin 60^\circ = \frac{\sqrt3}{2}", r"\frac{\sqrt3}{2}"),
    (r"\binom{8}{4} = 70", "70"),
    (r"\sum_{k=1}^{10} k = 55", "55"),
    (r"x = \frac{-1+\sqrt5}{2}", r"\frac{-1+\sqrt5}{2}"),
    # With the wrapping of models.
    (r"\text{Answer: }5", "5"),
    (r"\begin{aligned} x &= 5 \end{aligned}", "5"),
    (r"x=5 \Rightarrow 5", "5"),
    ("|AB| = 5", "5"),
    (r"9.8\text{ m}\cdot\text{s}^{-2}", "9.8"),
    (r"2.5\times 10^{-3}\text{ mol}\cdot\text{L}^{-1}", "0.0025"),
    ("1.5 x 10^3", "1500"),
    ("5 元", "5"),
    ("x=5或x=-5", "5,-5"),
    # More shapes of results.
    (r"-\frac{1}{2}\left(1-\sqrt{5}\right)", r"\frac{\sqrt5-1}{2}"),
    (r"\frac{2}{3}\sqrt{3}\pi", r"\frac{2\pi\sqrt3}{3}"),
    (r"6\pi - 9\sqrt{3}", r"3(2\pi-3\sqrt3)"),
    (r"\frac{1}{3}x^3-x+C", r"\frac{x^3}{3}-x+C"),
    (r"\frac{n(n-1)}{2}", r"\binom n2"),
    (r"\frac{4^n-1}{3}", r"\frac{1}{3}(4^n-1)"),
    (r"e^{2x}(1+x)", r"e^{2x}+xe^{2x}"),
    (r"x\ln x - x", r"x(\ln x-1)"),
    (r"\frac{e^x-e^{-x}}{2}", r"\sinh x"),
    (r"\sinh x", r"\frac{e^x-e^{-x}}{2}"),
    (r"\sec^2 x", r"\frac{1}{\cos^2 x}"),
    (r"\sqrt{2}+\sqrt{3}", r"\sqrt{5+2\sqrt6}"),
    ("10^{3/2}", r"10\sqrt{10}"),
    (r"10\sqrt{10}", "10^{3/2}"),
    (r"1-\left(1-p\right)^n", "1-(1-p)^n"),
    (r"\frac{1-r^n}{1-r}", r"\frac{r^n-1}{r-1}"),
    (r"2k\pi+\frac{\pi}{4}", r"\frac{\pi}{4}+2k\pi"),
    (r"a_n = 2 \cdot 3^{n-1}", r"2\cdot3^{n-1}"),
    (r"\frac{x^2}{9}+\frac{y^2}{4}=1", "4x^2+9y^2=36"),
    (r"y=-\frac{1}{2}x+3", "x+2y=6"),
    (r"1+2i, 1-2i", r"1\pm2i"),
    (r"\langle 1,2,3\rangle", "(1,2,3)"),
    # Several values, intervals, matrices, equations, words.
    ("1, 2", "2, 1"),
    (r"1 \pm \sqrt{19}", r"1+\sqrt{19}, 1-\sqrt{19}"),
    (r"x = 1 \text{ or } x = 2", "1,2"),
    (r"\frac{-3 \pm \sqrt{5}}{2}", r"\frac{-3+\sqrt5}{2}, \frac{-3-\sqrt5}{2}"),
    (r"(3, \frac{\pi}{2})", r"\left(3,\frac{\pi}{2}\right)"),
    (r"(1,2) \cup (3,\infty)", r"(1,2)\cup(3,\infty)"),
    ("x < 5", r"(-\infty,5)"),
    (r"-2 \le x \le 7", "[-2,7]"),
    (r"\{1,2,3\}", r"\{3,2,1\}"),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
    (r"\frac15\begin{pmatrix} 3 \\ 4 \end{pmatrix}", r"\begin{pmatrix} 3/5 \\ 4/5 \end{pmatrix}"),
    (r"2\begin{pmatrix} 3 \\ 4 \end{pmatrix}", r"\begin{pmatrix} 6 \\ 8 \end{pmatrix}"),
    ("y = 2x+3", "y=2x+3"),
    ("y - 2x = 3", "y=2x+3"),
    ("y-3=2(x-1)", "y=2x+1"),
    ("(x-1)^2+(y-2)^2=3^2", "(x-1)^2+(y-2)^2=9"),
    ("(x-1)^2+y^2=4", "x^2-2x+y^2=3"),
    ("3:5", r"\frac35"),
    ("204_6", "204_6"),
    (r"\text{Evelyn}", "Evelyn"),
    ("(C)", r"\text{(C)}"),
    ("4:30 PM", r"\text{4:30 p.m.}"),
    (r"\emptyset", r"\emptyset"),
    (r"\mathbb{R} \setminus \{3\}", r"(-\infty,3)\cup(3,\infty)"),
    ("five", "5"),
]
"""Results as models write them: nothing is left to do, or no more than in the gold."""


def config(**fields: Any) -> Any:
    return TypeAdapter(RewardConfig).validate_python(fields)


@pytest.mark.slow
def test_the_restatements_are_many_and_are_equal_to_their_golds_where_the_grader_reads_them() -> None:
    assert len(RESTATED) == len({answer for answer, _ in RESTATED}) == 23
    verdicts = grade([(rf"\boxed{{{answer}}}", gold) for answer, gold in LEFT])
    unequal = [answer for (answer, _), verdict in zip(LEFT, verdicts, strict=True) if not verdict]
    assert set(unequal) <= {r"17 \bmod 5", r"\lim_{x\to0}\frac{\sin x}{x}", r"[1,3]\cap[2,4]"}


@pytest.mark.parametrize(("answer", "gold"), LEFT)
def test_an_answer_that_leaves_operations_is_refused(answer: str, gold: str) -> None:
    assert not is_evaluated(answer, gold)
    assert is_evaluated(answer, answer)


@pytest.mark.parametrize(("answer", "gold"), WRITTEN)
def test_a_result_is_not_refused_however_it_is_written(answer: str, gold: str) -> None:
    assert is_evaluated(answer, gold)
    assert is_evaluated(answer, gold, f"What is it? ${gold}$, or another number, 12 or 7?")


def test_the_results_are_right() -> None:
    verdicts = grade([(rf"\boxed{{{answer}}}", gold) for answer, gold in WRITTEN])
    assert [pair for pair, verdict in zip(WRITTEN, verdicts, strict=True) if not verdict] == []


def test_of_the_right_answers_of_the_table_only_those_with_operations_are_refused() -> None:
    refused = set()
    for case in CASES:
        answer = extract_answer(case.answer)
        if case.correct and answer is not None and not is_evaluated(answer, gold_answer(case.gold)):
            refused.add((case.kind, answer))
    kinds = {"evaluated", "unicode", "complex", "polynomial", "function", "operators", "identity", "notation"}
    assert {kind for kind, _ in refused} <= kinds | {"spellings", "root", "interval"}
    assert 40 <= len(refused) <= 60


@pytest.mark.parametrize(
    ("question", "answer", "gold"),
    [
        (r"Simplify $\frac{\sin 2x}{2\cos x}$.", r"\frac{\sin 2x}{2 \cos x}", r"\sin x"),
        (r"Simplify $\frac{\sin 2x}{2\cos x}$.", r"\frac{\sin(2x)}{2\cos(x)}", r"\sin x"),
        ("Factor $x^2+2x+1$.", "x^2 + 2x + 1", "(x+1)^2"),
        ("Factor x^2+2x.", "x^2+2x", "x(x+2)"),
        (r"Simplify $\sqrt{50}$.", r"\sqrt{50}", r"5\sqrt2"),
        (r"Rationalize $\dfrac{1}{\sqrt{2}-1}$.", r"\frac1{\sqrt2-1}", r"\sqrt2+1"),
        (r"Write $\frac{6}{8}$ in lowest terms.", r"\frac68", r"\frac34"),
        (r"What is 25 \div 2?", "25/2", "12.5"),
        (r"Simplify $\frac{x^5}{x^2}$.", r"\frac{x^5}{x^2}", "x^3"),
        ("Simplify $(2x)^3$.", "(2x)^3", "8x^3"),
        (r"Reduce $\frac{4x}{6}$.", r"\frac{4x}{6}", r"\frac{2x}{3}"),
        (r"Express $0.\overline{7}$ as a fraction.", r"0.\overline{7}", r"\frac79"),
        ("Write 1024 as a power of 2.", "1024", "2^{10}"),
        (r"Write 8 as a power of 2.", "8", "2^{3}"),
        ("Which line is $2x - y + 3 = 0$ in slope-intercept form?", "2x-y+3=0", "y=2x+3"),
        (r"Find $\log 20 - \log 2 + \log 3$.", r"\log 20 - \log 2 + \log 3", r"1+\log 3"),
        (r"Reduce $\frac{12}{18}$.", "12/18", r"\frac23"),
        (r"Rationalize $\frac{1}{\sqrt3}$.", r"1/\sqrt3", r"\frac{\sqrt3}{3}"),
        ("Expand $3(x+2)$.", "(2+x)3", "3x+6"),
        ("Factor $x^2-9$.", "-9+x^2", "(x-3)(x+3)"),
        ("Factor $x^2-9$.", "1(x^2-9)", "(x-3)(x+3)"),
        (r"Simplify $x\cdot x^2$.", r"x^2\cdot x", "x^3"),
        (r"Simplify $y = \frac{x^2-1}{x-1}$.", r"\frac{-1+x^2}{x-1}", "x+1"),
        (r"Simplify $\frac{1}{\frac{1}{x}}$.", r"\frac1{1/x}", "x"),
        ("Write $0.375$ as a common fraction.", "0.375", r"\frac38"),
        ("Write 0.375 as a common fraction.", ".3750", r"\frac38"),
        (r"Write $\frac38$ as a decimal.", r"\frac38", "0.375"),
        ("Write 3/8 as a decimal.", r"\frac38", "0.375"),
        ("Half of it is 0.5 kg. What fraction is that?", "0.5", r"\frac12"),
        ("Write 37.5% as a decimal.", r"37.5\%", "0.375"),
        ("Write 0.375 in percent.", "0.375", r"37.5\%"),
        ("Write 1500 in scientific notation.", "1,500", r"1.5\times10^3"),
        (r"Write $1.5\times10^3$ in full.", r"1.5\cdot10^3", "1500"),
        ("Write 1.5e3 in full.", "1.5e3", "1500"),
        (r"Write $3\frac12$ as an improper fraction.", r"3\frac12", r"\frac72"),
        ("Write 3 1/2 as an improper fraction.", r"3\frac12", r"\frac72"),
        (r"Write $\frac72$ as a mixed number.", r"\frac72", r"3\frac12"),
        ("Write $x^{-2}$ without negative exponents.", "x^{-2}", r"\frac1{x^2}"),
        ("Write 5 million in digits.", "5 million", "5000000"),
        ("How many eggs are 5 dozen eggs?", "5 dozen", "60"),
        ("Write twenty-five in digits.", r"\text{Twenty five}", "25"),
        ("Write the ratio 3:5 as a fraction.", "3:5", r"\frac35"),
    ],
)
def test_an_answer_that_stands_in_the_question_in_another_form_is_refused(
    question: str, answer: str, gold: str
) -> None:
    assert is_evaluated(answer, gold)
    assert not is_evaluated(answer, gold, question)


HALFWAY = [
    ("Write $4x-2y=-2$ in slope-intercept form.", "2x-y=-1", "y=2x+1"),
    ("Write $4x-2y=-2$ in slope-intercept form.", "4x=2y-2", "y=2x+1"),
    ("Write $4x-2y=-2$ in slope-intercept form.", r"x=\frac{y-1}{2}", "y=2x+1"),
    ("Solve for y: 2x+y=5.", "y+2x=5", "y=5-2x"),
    ("Solve for y: 2x+y=5.", "2y+2x-5=y", "y=5-2x"),
    ("Factor $2x^2-7x-15$.", "-(15+7x-2x^2)", "(2x+3)(x-5)"),
    ("Factor $2x^2-7x-15$.", "x(2x-7)-15", "(2x+3)(x-5)"),
    ("Factor $2x^2-7x-15$.", "2xx-7x-15", "(2x+3)(x-5)"),
    ("Factor $2x^2-7x-15$.", r"\frac{4x^2-14x-30}{2}", "(2x+3)(x-5)"),
    ("Factor $2x^2-18$.", "2(x^2-9)", "2(x-3)(x+3)"),
    ("Factor $x^2+2x+1$.", "x(x+2)+1", "(x+1)^2"),
    ("Expand $(2x+3)(x-5)$.", "x(2x+3)-5(2x+3)", "2x^2-7x-15"),
    (r"Simplify $\sqrt{50}$.", "50^{1/2}", r"5\sqrt2"),
    (r"Simplify $\sqrt{50}$.", "50^{0.5}", r"5\sqrt2"),
    (r"Simplify $\sqrt{50}$.", r"\sqrt[4]{2500}", r"5\sqrt2"),
]
"""Formulas of a question that are rewritten, but not into the form that it asks for."""


@pytest.mark.parametrize(("question", "answer", "gold"), HALFWAY)
def test_a_formula_of_the_question_that_is_rewritten_halfway_is_refused(question: str, answer: str, gold: str) -> None:
    assert grade([(rf"\boxed{{{answer}}}", gold)]) == [True]
    assert not is_evaluated(answer, gold, question)
    assert is_evaluated(gold.replace(" ", "  "), gold, question)


@pytest.mark.parametrize(
    ("question", "answer", "gold"),
    [
        ("Which line has slope 2 and contains $(1,3)$?", "y-3=2(x-1)", "y=2x+1"),
        ("Which line has slope 2 and contains $(1,3)$?", "2x-y=-1", "y=2x+1"),
        ("Write $4x-2y=-2$ in slope-intercept form.", "2x+1=y", "y=2x+1"),
        ("Write $4x-2y=-2$ in slope-intercept form.", "1+2x", "y=2x+1"),
        ("What is the sum of the first $x$ odd numbers and $2x+1$?", "x^2+2x+1", "(x+1)^2"),
        ("Factor $2x^2-7x-15$.", "-(5-x)(2x+3)", "(2x+3)(x-5)"),
        ("Factor $x^2+2x+1$.", "(x+1)(x+1)", "(x+1)^2"),
        ("Simplify $x^2+3x-2x$.", "x(x+1)", "x^2+x"),
        (r"Integrate $\ln x$.", r"x\ln x-x", r"x(\ln x-1)"),
        (r"Simplify $\sqrt{50}$.", r"\sqrt2\cdot5", r"5\sqrt2"),
        (r"Rationalize $\frac{1}{\sqrt2-1}$.", r"\sqrt2+1", r"1+\sqrt2"),
        (r"Rationalize $\frac{4}{\sqrt3}$.", r"\frac43\sqrt3", r"\frac{4\sqrt3}{3}"),
        ("How long is the diagonal of a square of side 5?", r"\sqrt{50}", r"5\sqrt2"),
        ("Reduce $12/18$.", "24/36", r"\frac23"),
    ],
)
def test_a_result_in_another_form_is_right_where_the_question_does_not_hold_it(
    question: str, answer: str, gold: str
) -> None:
    assert is_evaluated(answer, gold, question)


@pytest.mark.parametrize(
    ("question", "answer", "gold"),
    [
        ("He eats 18 of 36 eggs. How many are left?", "18", "18"),
        (r"Is $\frac12$ or $\frac13$ larger?", r"\frac12", r"\frac{1}{2}"),
        ("A coin shows heads in 25 of 50 throws. What share?", r"50\%", r"\frac12"),
        ("They sell 5 more apples. How many?", "5 million", "5000000"),
        (r"Which? (A) 3 (B) 5", "(B) 5", "B"),
        ("It costs $5.00.", "5.00", "5"),
        ("Which is larger, $2^{30}$ or $3^{20}$?", "3^{20}", "3^{20}"),
        (r"Which is larger, $\sqrt8$ or $2$?", r"\sqrt{8}", r"\sqrt8"),
        ("Let $f(x)=x+1$. What is $g(x)$?", "x+1", "1 + x"),
        (r"Let $AB = 2\pi$. What is $BC$?", r"2\pi", r"\pi\cdot 2"),
        ("There are 148 boys. Write the girls as a power of 2, as in 2^3.", "8", "2^3 "),
        ("A box holds 312 balls.", "12", r"3\cdot4"),
        ("Of 12.5 litres some is lost.", "12", r"3\cdot4"),
        ("It grows as 12^5.", "12", r"3\cdot4"),
        ("Is it $(x+1)^2$?", "x+1", r"\frac{x^2-1}{x-1}"),
        (r"Find $x$ in $\sqrt{x^2} = 3$.", "x", r"\sqrt{x^2}"),
        ("Say $y = 2x + 3$ in words.", "y=2x+3", "y = 3+2x"),
        ("What of x < 5?", "x < 5", r"(-\infty,5)"),
    ],
)
def test_what_stands_in_the_question_by_chance_or_in_the_form_of_the_gold_is_not_refused(
    question: str, answer: str, gold: str
) -> None:
    assert is_evaluated(answer, gold, question)


def test_pairs_without_an_answer_stay_as_they_are() -> None:
    pairs = [(None, "5"), ("5", "5"), ("2+3", "5"), ("2+3", r"so \boxed{5}"), ("8", "#### 8")]
    assert only_evaluated(pairs, [""] * 5) == [(None, "5"), ("5", "5"), (None, "5"), (None, r"so \boxed{5}"), pairs[4]]


def test_texts_of_any_kind_cost_little_and_raise_nothing() -> None:
    generator = random.Random(0)
    pieces = [
        r"\frac",
        "{",
        "}",
        "(",
        ")",
        "1",
        "2",
        "x",
        "+",
        "-",
        "^",
        "!",
        r"\sqrt",
        r"\sin",
        "|",
        "=",
        ",",
        " ",
        r"\cdot",
    ]
    texts = ["".join(generator.choices(pieces, k=generator.randrange(1, 40))) for _ in range(1500)]
    texts += [
        "1+" * 120 + "1",
        "x" * 250,
        "-" * 250 + "1",
        "2^" * 15 + "2",
        "9^{9^{9.5}}",
        "1e9000",
        "(" * 19 + "x" + ")" * 19,
    ]
    texts += [r"\frac1{" * 15 + "2" + "}" * 15, "x!" * 60, "|x" * 60, "5" * 3000, "(x+1)" * 50, "(1+i)^9999", "2" * 255]
    started = time.process_time()
    for text in texts:
        is_evaluated(text, r"\frac12", r"Simplify $\sqrt{50}+2x$ " * 20)
        is_evaluated("5", text)
    assert time.process_time() - started < 10


def test_a_long_question_is_searched_in_little_time() -> None:
    started = time.process_time()
    assert not is_evaluated(r"\sqrt{50}", r"5\sqrt2", "word " * 5000 + r"\n Simplify $\sqrt{50}$" + "1 + " * 5000)
    assert time.process_time() - started < 3


@pytest.mark.parametrize(
    ("extraction", "frame"),
    [
        ("auto", r"a</think> \boxed{{{}}}"),
        ("r1_zero", "a</think> <answer>{}</answer>"),
        ("boxed", r"a</think> \boxed{{{}}}"),
    ],
)
def test_the_mathematical_rewards_refuse_where_a_recipe_asks_for_it(
    group: Callable[..., Group], extraction: str, frame: str
) -> None:
    texts = [frame.format(answer) for answer in ("18", r"2\cdot9", r"\sum_{k=1}^{10^9} 1", "19")]
    asked = group(*texts, text="How many? <think>")
    strict = build_reward({"right": config(type="math", extraction=extraction, evaluated=True)})
    assert strict([asked]).total == [[1.0, 0.0, 0.0, 0.0]]
    assert strict.failures == {}
    loose = build_reward({"right": config(type="math", extraction=extraction)})
    assert loose([group(*texts[:2], text="How many? <think>")]).total == [[1.0, 1.0]]
    for reward in (strict, loose):
        reward.close()


@pytest.mark.slow
def test_the_published_functions_refuse_if_they_are_asked_to() -> None:
    answer, question = r"\sqrt{50}", r"Simplify $\sqrt{50}$."
    for reward, response in (
        (r1_zero_reward, f"a</think> <answer>{answer}</answer>"),
        (question_only_reward, rf"\boxed{{{answer}}}"),
    ):
        assert reward(response, r"5\sqrt2")["reward"] == 1.0
        assert reward(response, r"5\sqrt2", evaluated=True)["reward"] == 1.0
        refused = reward(response, r"5\sqrt2", evaluated=True, question=question)
        assert refused == {"format_reward": 1.0, "answer_reward": 0.0, "reward": 0.0}


@pytest.mark.slow
def test_the_command_refuses_with_its_option_only(tmp_path: Path) -> None:
    file = rows(tmp_path, (r"\boxed{2^3}", "8"), (r"\boxed{8}", "8"), (r"\boxed{\sqrt{50}}", r"5\sqrt2"))
    assert json.loads(run(file, "--json"))["verdicts"] == [True, True, True]
    assert json.loads(run(file, "--json", "--evaluated"))["verdicts"] == [False, True, True]
    lines = [json.loads(line) for line in Path(file).read_text().splitlines()]
    lines[2]["question"] = r"Simplify $\sqrt{50}$."
    Path(file).write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert json.loads(run(file, "--json", "--evaluated"))["verdicts"] == [False, True, False]
    file = rows(tmp_path, (r"\boxed{144/12}", "12"), (r"\boxed{12}", "12"), ("#### 12", "5 + 7\n#### 12"))
    lines = [json.loads(line) | {"question": "What is 144/12?"} for line in Path(file).read_text().splitlines()]
    Path(file).write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert json.loads(run(file, "--json", "--task", "gsm8k", "--evaluated"))["verdicts"] == [False, True, True]
    assert json.loads(run(file, "--json", "--task", "gsm8k"))["verdicts"] == [True, True, True]


@pytest.mark.parametrize(
    ("extraction", "frame"), [("answer_tag", "<answer>{}</answer>"), ("boxed", r"\boxed{{{}}}"), ("whole", "{}")]
)
def test_the_reward_for_numbers_refuses_too(group: Callable[..., Group], extraction: str, frame: str) -> None:
    asked = group(*map(frame.format, ("12", "12.0", "24/2", "144/12", "13")), gold="12")
    example = replace(asked.prompt.example, question="What is 144/12?")
    asked = replace(asked, prompt=replace(asked.prompt, example=example))
    loose = build_reward({"right": config(type="number", extraction=extraction)})
    strict = build_reward({"right": config(type="number", extraction=extraction, evaluated=True)})
    assert loose([asked]).total == [[1.0, 1.0, 1.0, 1.0, 0.0]]
    assert strict([asked]).total == [[1.0, 1.0, 0.0, 0.0, 0.0]]
    sums = group(*map(frame.format, (r"11+\frac{2}{2}", "12")), gold="12")
    assert strict([sums]).total == [[0.0, 1.0]]


def test_an_answer_that_is_refused_has_a_vote_of_its_own(
    completion: Callable[..., Completion], prompt: Callable[..., Prompt]
) -> None:
    texts = [completion(rf"\boxed{{{answer}}}") for answer in ("12", "12.0", "144/12")]
    asked = prompt("12")
    asked = replace(asked, example=replace(asked.example, question="What is 144/12?"))
    for type, rest in (("math", {}), ("number", {"extraction": "boxed"})):
        reward = build_reward({"right": config(type=type, evaluated=True, **rest)})
        first, second, refused = (reward.answer("right", text, asked) for text in texts)
        assert first == second == "12" != refused
        assert refused is not None
        loose = build_reward({"right": config(type=type, **rest)})
        assert {loose.answer("right", text, asked) for text in texts} == {"12"}


def test_patterns_take_digits_and_nothing_is_left_of_them(group: Callable[..., Group]) -> None:
    for extraction, text in (
        ("gsm8k_strict", "2*9 = 18\n#### 18"),
        ("last_number", "2*9 is 18"),
        ("gsm8k_flexible", "18"),
    ):
        reward = build_reward({"right": config(type="number", extraction=extraction, evaluated=True)})
        assert reward([group(text)]).total == [[1.0]]


def test_training_recipes_ask_for_results_and_a_published_protocol_for_values() -> None:
    asked = {}
    for name in ("tasks/math", "tasks/math500", "tasks/gsm8k", "math_qwen_24gb", "math_qwen_80gb"):
        asked[name] = load_recipe(f"flatpeak:{name}")["rewards"]["correctness"]["evaluated"]
    assert asked.pop("math_qwen_24gb") is asked.pop("math_qwen_80gb") is False
    assert set(asked.values()) == {True}
    assert [config(type=type).evaluated for type in ("math", "number")] == [False] * 2


def test_the_examples_of_the_page_are_refused_as_it_says() -> None:
    page = (Path(__file__).parents[3] / "docs" / "grading.md").read_text(encoding="utf-8")
    table = page.partition("## What is worked out")[2].partition("\n## ")[0]
    examples = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| `")]
    assert len(examples) >= 12
    for *cells, verdict in examples:
        question, answer, gold = (cell.strip("`").replace(r"\|", "|") for cell in cells)
        assert is_evaluated(answer, gold, question) == (verdict.strip() == "right"), (question, answer, gold)
