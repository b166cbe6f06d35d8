"""Reading and comparison of extracted answers by rules, and the choice of pairs that math-verify compares instead."""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache
from typing import Final

from flatpeak.rewards.math.equality import equal
from flatpeak.rewards.math.expression_values import PRECISE
from flatpeak.rewards.math.intervals import Reading, has_words, unnamed, unread_texts
from flatpeak.rewards.math.normalize import clean
from flatpeak.rewards.math.structured_answers import contradict, read
from flatpeak.rewards.math.syntax_tree import Node, OverLimitError, UndefinedError, integer, is_mixed_number

_TEXT: Final = re.compile(r"\\text\s*\{([^{}]*)\}")
_GOLD_LETTER: Final = re.compile(r"\(?\s*([A-J])\s*\)?\.?")
_NAMED: Final = r"(?:(?:the\s+)?(?:correct\s+)?(?:option|choice|answer)\s*:?\s*)"
_CHOSEN: Final = re.compile(
    rf"{_NAMED}?[(\[]\s*(?P<bracketed>[A-J])\s*[)\]]\s*[.:,]?(?P<after_bracket>.*)"
    rf"|{_NAMED}?(?P<labelled>[A-J])\s*(?:\)|(?P<point>[.:])(?=\s|$))(?P<after_label>.*)"
    rf"|{_NAMED}(?P<named>[A-J])\.?",
    re.IGNORECASE | re.DOTALL,
)
_ANOTHER: Final = re.compile(r"(?<![A-Za-z\\])[A-J](?![A-Za-z])|[(\[]\s*[a-j]\s*[)\]]")
_LETTER_IN_SENTENCE: Final = re.compile(
    r"\s*(?:[?/&|+\-*^_=<>]|\\(?:cdot|times|cup|cap|setminus|pm|mp|le|ge|ne|in|approx|to|Rightarrow)\b"
    r"|(?:and|or|but|nor|is|was|isn't|are|does|not|wrong|incorrect|false|no)\b(?! enough))",
    re.IGNORECASE,
)
_LEAD: Final = (
    r"(?:(?:so|thus|hence|therefore),?\s*)?(?:(?:the|our|my)\s+)?(?:(?:final|correct)\s+)?(?:answer|ans\b\.?|solution|result)"
    r"\s*(?:is\s*:?|:|=)\s*|(?:最终)?答案\s*(?:是|为|:)\s*:?\s*"
)
_PREFIXES: Final = (
    (re.compile(rf"^\\text\s*\{{\s*(?:{_LEAD})\}}\s*(?=\S)", re.IGNORECASE), ""),
    (re.compile(rf"^\\text\s*\{{\s*(?:{_LEAD})(?=[^\s}}])", re.IGNORECASE), r"\\text{"),
    (re.compile(rf"^(?:{_LEAD})(?=\S)", re.IGNORECASE), ""),
)
_NOTE: Final = re.compile(
    r"\s*(?:\(\s*(?:final )?(?:answer|ans)\.?\s*\)|\\text\s*\{\s*\(\s*(?:final )?(?:answer|ans)\.?\s*\)\s*\}"
    r"|\(\s*\\text\s*\{\s*(?:final )?(?:answer|ans)\.?\s*\}\s*\))$",
    re.IGNORECASE,
)
_REASON: Final = re.compile(
    r"^(?P<body>.*?\S)[\s,;]*(?:\(\s*)?(?:\\text\s*\{[\s,;]*(?:\(\s*)?)?(?<![A-Za-z])(?:since|because)\b(?P<reason>.*)$",
    re.IGNORECASE,
)
_MATHEMATICS: Final = re.compile(r"\d|\\[a-z]|[=<>]")
_ANOTHER_ANSWER: Final = re.compile(
    r"\b(?:or|if|else|otherwise|unless|alternatively|maybe|but|wrong|incorrect|mistaken?|actually|instead)\b"
    r"|\b(?:real|correct|right|true|actual) (?:answer|value|result|one)\b",
    re.IGNORECASE,
)
_NUMERAL: Final = re.compile(r"\d+(?:\.\d+)?")
_ITS_NUMBER: Final = re.compile(
    r"\b(?:it|this|that)(?:'s| is| equals) *\$?(\d+(?:\.\d+)?)(?= *(?:$|[.,;)}]))|\b(?:answer|correct|really)\b",
    re.IGNORECASE,
)
_CLAUSE: Final = re.compile(r"[,;]|\b(?:and|so)\b")
_UNIT_IN_PARENTHESES: Final = re.compile(r"\(\s*\\text\s*\{([^{}()]*)\}\s*\)$")
_PROSE: Final = re.compile(r"\\text|\\[a-z]?dots|\.\.")
_OPERATORS: Final = re.compile(r"\\(?:int|sum|prod|lim|max|min|gcd|lcm|cap|setminus|bmod|det|sup)(?![A-Za-z])")
_EQUALS: Final = re.compile(r"(?<![<>!])=(?!=)")
_RELATIONS: Final = frozenset({"equation", "inequality"})


def rule_verdict(answer: str, gold: str, *, precise: bool = True) -> bool | None:
    """The verdict of the rules on an extracted answer and a gold answer; None without a verdict.

    An answer beyond a limit is False, because no gold answer is beyond it; a gold answer beyond a limit is an
    OverLimitError. Without `precise`, values are compared only as fractions and in double precision, which is always
    fast, and equal irrational values have no verdict.
    """
    if not answer.strip() or not gold.strip() or answer.strip() == gold.strip():
        return answer.strip() == gold.strip()
    read_answer(gold)
    token = PRECISE.set(precise)
    try:
        return _rules(answer, gold)
    except (OverLimitError, UndefinedError):
        return False
    finally:
        PRECISE.reset(token)


def suits_math_verify(answer: str, gold: str) -> bool:
    """Whether math-verify compares a pair that the rules cannot decide.

    math-verify reads as much of a text as it understands, such as the 5 of `5\\ldots` and of `5\\text{ of } 6`. So it
    gets only texts without words or dots and with balanced braces; texts that the rules cannot read must also have an
    operator for which it is reliable.
    """
    (answer_text, answer_reading), (gold_text, gold_reading) = read_answer(answer), read_answer(gold)
    if any(_PROSE.search(text) or has_words(text) or not _balanced(text) for text in (answer_text, gold_text)):
        return False
    if gold_reading.kind != answer_reading.kind and not _RELATIONS.isdisjoint((gold_reading.kind, answer_reading.kind)):
        return False
    readable = not [*unread_texts(answer_reading), *unread_texts(gold_reading)]
    return readable or any(_OPERATORS.search(text) is not None for text in (answer_text, gold_text))


@lru_cache(maxsize=8192)
def read_answer(text: str, *, join_thousands: bool = True) -> tuple[str, Reading]:
    """(cleaned text, reading) of an answer; OverLimitError if it is too long or too deep."""
    cleaned = clean(text, join_thousands=join_thousands)
    return cleaned, read(bare_answer(cleaned))


def read_number(text: str) -> Fraction | None:
    """The number that a whole text is, or None: `18`, `x = 18`, `18 red apples`, `\\frac{36}{2}`, `5 million`.

    Units and percent signs are dropped, magnitudes count, and unevaluated arithmetic is not a number. In an equation
    with words (`3 eggs + 15 eggs = 18`), the side after the last `=` counts.
    """
    reading = _reading_or_none(text)
    if reading is None or reading.kind in ("unread", "text", "equation"):
        sides = [_reading_or_none(side) for side in _EQUALS.split(text)[-2:]]
        reading = sides[-1] if len(sides) > 1 else reading
        if reading is None or (len(sides) > 1 and sides[0] is not None and _contradict(sides[0], reading)):
            return None
    reading = unnamed(reading)
    if reading.kind != "scalar" or reading.expression is None:
        return None
    node = reading.expression.node
    if reading.unit is not None and reading.unit.factor != 1:
        node = node.args[0]  # the factor before a magnitude
    if not _is_numeral(node):
        return None
    try:
        return reading.expression.exact
    except (UndefinedError, OverLimitError):
        return None


def normalized(answer: str) -> str:
    """An extracted answer in one spelling, for counting votes: `3/4` for every spelling of a rational number."""
    try:
        cleaned, reading = read_answer(answer)
        reading = unnamed(reading)
        exact = reading.expression.exact if reading.kind == "scalar" and reading.expression is not None else None
        return "".join(cleaned.split()) if exact is None else str(exact)
    except Exception:  # over a limit, without a value, too long for a decimal: no text may stop a run
        return "".join(answer.split())[:256]


def _balanced(text: str) -> bool:
    return _without_group_end(text) == text and text.count("{") == text.count("}")


def _rules(answer: str, gold: str) -> bool | None:
    (answer_text, answer_reading), (gold_text, gold_reading) = read_answer(answer), read_answer(gold)
    if not answer_text or not gold_text or answer_text == gold_text:
        return answer_text == gold_text != ""
    letter = gold_letter(gold_text)
    if letter is not None and (chosen := chosen_letter(bare_answer(answer_text))) is not None:
        return chosen == letter
    verdict = equal(gold_reading, answer_reading)
    return _as_lists(gold, answer) if verdict is False and "," in gold + answer else verdict


def _as_lists(gold: str, answer: str) -> bool | None:
    """The verdict with `81,256` as two numbers, if the other is a list with several commas, or spaces after them."""
    readings = [[read_answer(text)[1], read_answer(text, join_thousands=False)[1]] for text in (gold, answer)]
    if "list" not in (readings[0][0].kind, readings[1][0].kind):
        return False
    return equal(readings[0][1], readings[1][1])


def gold_letter(text: str) -> str | None:
    """The letter of a cleaned gold answer that is a letter: `B`, `(B)`, `\\text{(B)}`."""
    match = _GOLD_LETTER.fullmatch(_without_text_commands(text))
    return None if match is None else match[1]


def chosen_letter(text: str) -> str | None:
    """The letter that a cleaned answer names, alone or before the option's text; None if it names none or another.

    A letter without parentheses or text is left to the rules: it may be a variable.
    """
    match = _CHOSEN.fullmatch(_without_text_commands(text))
    if match is None:
        return None
    letter = match["bracketed"] or match["labelled"] or match["named"]
    if letter == "i" or (match["point"] and letter.islower()):  # the imaginary unit, and the end of a word
        return None
    rest = match["after_bracket"] or match["after_label"] or ""
    if _ANOTHER.search(rest) or _LETTER_IN_SENTENCE.match(rest):
        return None
    return letter.upper()


def _without_text_commands(text: str) -> str:
    return _TEXT.sub(r"\1 ", text).strip()


def bare_answer(text: str) -> str:
    """A text from `clean` without an announcement before it, a reason after it, or a note that it is the answer."""
    for prefix, replacement in _PREFIXES:
        stripped = prefix.sub(replacement, text, count=1)
        if stripped != text:
            text = stripped
            break
    text = _NOTE.sub("", text) or text
    match = _REASON.match(text)
    if match is not None and _MATHEMATICS.search(match["body"]) and not _denies(match["reason"], match["body"]):
        text = match["body"]
    return _UNIT_IN_PARENTHESES.sub(r"\\text{(\1)}", text)


def _denies(reason: str, body: str) -> bool:
    r"""Whether a reason contradicts its answer: `5 since 6 is the answer`, `x = 5 since x \ne 5`."""
    words = _without_text_commands(_without_group_end(reason))
    numbers = set(_NUMERAL.findall(words)) - set(_NUMERAL.findall(body))
    if _ANOTHER_ANSWER.search(words) or any(
        match[1] in numbers if match[1] else numbers for match in _ITS_NUMBER.finditer(words)
    ):
        return True
    answer = read(body)
    value = answer.items[0] if answer.kind == "named" else answer
    for clause in _CLAUSE.split(words):
        reading = read(clause if _balanced(clause) else clause.rstrip(" )}."))
        same_name = reading.kind == "named" and (answer.kind != "named" or answer.label == reading.label)
        if same_name and _contradict(value, reading):
            return True
        if reading.label == r"\ne" and any(item.text == value.text for item in reading.items):
            return True
    return False


def _without_group_end(text: str) -> str:
    """A text without the brace that closes the group in which it begins: `since it's } 6`."""
    depth = 0
    for index, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if depth < 0:
            return f"{text[:index]} {text[index + 1 :]}"
    return text


def _reading_or_none(text: str) -> Reading | None:
    try:
        return read_answer(text)[1] if text.strip() else None
    except OverLimitError:
        return None


def _contradict(first: Reading, second: Reading) -> bool:
    try:
        return contradict(first, second)
    except OverLimitError:
        return True


def _is_numeral(node: Node) -> bool:
    """Whether a node is digits, a fraction, a mixed number or scientific notation, possibly with a sign."""
    match node.kind:
        case "number":
            return True
        case "neg":
            return _is_numeral(node.args[0])
        case "div":
            return all(each.kind == "number" or (each.kind == "neg" and _is_numeral(each)) for each in node.args)
        case "add":
            return is_mixed_number(node)
        case "mul":
            first, second = node.args
            return _is_numeral(first) and _is_power_of_ten(second)
        case _:
            return _is_power_of_ten(node)


def _is_power_of_ten(node: Node) -> bool:
    if node.kind != "pow" or node.args[0] != integer(10):
        return False
    exponent = node.args[1].args[0] if node.args[1].kind == "neg" else node.args[1]
    return exponent.kind == "number"
