"""Normalization of answers to one spelling: Unicode, LaTeX layout, environments, thousands separators, brackets."""

from __future__ import annotations

import re
import tomllib
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Final

from flatpeak.rewards.math.syntax_tree import MAX_CHARACTERS, MAX_DEPTH, MAX_RAW_CHARACTERS, OverLimitError, nesting
from flatpeak.rewards.math.units import ABBREVIATIONS

ROW_END: Final = "\ue000"
"""The end of a row, as a private-use character that no answer contains."""

_ENVIRONMENT: Final = re.compile(
    r"^(?:\\\{\s*)?\\begin\s*\{\s*(?P<name>aligned|align|gathered|gather|split|equation|d?cases|rcases|array)(?P<star>\*?)\s*\}"
    r"(?P<body>(?:(?!\\(?:begin|end)\s*\{\s*(?P=name)).)*)\\end\s*\{\s*(?P=name)(?P=star)\s*\}\s*(?:\\\})?$",
    re.DOTALL,
)
_INNER_ENVIRONMENT: Final = re.compile(
    r"\\begin\s*\{\s*(?P<name>[A-Za-z]+\*?)\s*\}(?:(?!\\begin|\\end).)*\\end\s*\{\s*(?P=name)\s*\}", re.DOTALL
)
_SIGN: Final = r"(?:[=<>]|\\(?:le|ge|ne|approx|in|Rightarrow)(?![A-Za-z]))"
_RELATION: Final = re.compile(_SIGN)
_GOES_ON: Final = re.compile(rf"^\s*{_SIGN}")
_ALIGNMENT: Final = ((re.compile(rf"\s*&\s*(?={_SIGN})"), " "), (re.compile(rf"(?P<sign>{_SIGN})\s*&"), r"\g<sign>"))

FUNCTIONS: Final = (
    "arcsinh|arccosh|arctanh|arcsin|arccos|arctan|sinh|cosh|tanh|coth|sech|csch|sin|cos|tan|cot|sec|csc|log|ln|lg|exp"
)
"""Function names that are read with or without a backslash."""

_TABLES: Final = tomllib.loads(Path(__file__).with_name("spellings.toml").read_text("utf-8"))
_CHARACTERS: Final[dict[int, str]] = {
    ord(character): spelled for spelled, characters in _TABLES["characters"].items() for character in characters
}
_COMMANDS: Final[dict[str, str]] = {
    command: spelled for spelled, commands in _TABLES["commands"].items() for command in commands.split()
}
_RAISED: Final = re.compile("[\u2070\u00b9\u00b2\u00b3\u2074-\u2079\u207a\u207b]+")
_LOWERED: Final = re.compile("[\u2080-\u2089]+")
_VULGAR: Final = re.compile("[\u00bc-\u00be\u2150-\u215e\u2189]")

_Rule = tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]


def _rules(*rules: tuple[str, str | Callable[[re.Match[str]], str]]) -> tuple[_Rule, ...]:
    return tuple((re.compile(pattern), replacement) for pattern, replacement in rules)


def _operator_name(match: re.Match[str]) -> str:
    name = match[1]
    return rf"\text{{{name}}}" if name in ABBREVIATIONS - {"min", "deg"} or len(name) == 1 else rf"\{name} "


def _wide_space(match: re.Match[str]) -> str:
    """A space; between digits, which are then two numbers, a command that belongs to neither."""
    before, after = match.string[: match.start()].rstrip(), match.string[match.end() :].lstrip()
    return r"\quad " if before[-1:].isdigit() and after[:1].isdigit() else " "


def _colored(match: re.Match[str]) -> str:
    """Remove a color command at the beginning of a term; keep it after a factor, which its braces would multiply."""
    before = match.string[: match.start()].rstrip()
    return match[0] if before[-1:].isalnum() or before[-1:] in ("}", ")") else ""


def _repeating(match: re.Match[str]) -> str:
    r"""`0.1666...` as `0.1\overline{6}`: a period of one or two digits is shown three times, a longer period twice."""
    whole, digits = match.groups()
    for length in range(1, len(digits) // 2 + 1):
        period, times = digits[-length:], 1
        while digits.endswith(period * (times + 1)):
            times += 1
        if times > 2 or (times == 2 and length > 2):
            return rf"{whole}.{digits[: len(digits) - length * times]}\overline{{{period}}}"
    return match[0]


_LATEX_RULES: Final = _rules(
    # Two backslashes end a row of a matrix; elsewhere they are one backslash, escaped twice.
    (r"(?s)^(?!.*\\begin).*$", lambda match: match[0].replace("\\\\", "\\")),
    (r"\\\\(?:\[[^\[\]]*\])?|\\cr(?![A-Za-z])", ROW_END),
    (r"\\[()]|(?<!\\)\\$", " "),
    # A comma without a space after it, as set by `\\!` and braces, separates thousands instead of items.
    (r"(?<=\d)\s*(?:,\s*\\!|\\!\s*,(?:\s*\\!)?|\{\s*,\s*\}(?:\\!)?)\s*(?=\d{3}(?!\d))", ""),
    (r"(?<=\d)\s*\{:\}\s*(?=\d)", ":"),
    (r"\\!|\\(?:displaystyle|textstyle|scriptstyle|limits|nolimits|hfill|noindent)(?![A-Za-z])", ""),
    (r"\\(?:left|right|middle|[bB]ig+[lrm]?)(?![A-Za-z])\s*\.?(?=\s*[^\s\d]|\s*$)", ""),
    (r"\\(?:vphantom|vspace|label|tag)\s*\*?(?:\{[^{}]*\}|[^{\w\\])", ""),
    (r"(?:\s*\\(?:q?quad(?![A-Za-z])|(?:h?phantom|hspace)\s*\*?(?:\{[^{}]*\}|[^{\w\\])))+", _wide_space),
    (r"\\(?:thinspace|enspace|space|medspace|thickspace)(?![A-Za-z])|\\[,;:>/ ]|~", " "),
    (r"\\operatorname\s*\*?\{\s*([A-Za-z]+)\s*\}", _operator_name),
    (r"\\(?:textcolor\s*(?:\[[A-Za-z]+\]\s*)?|color\s*)\{\s*(?!white|transparent)[A-Za-z#][\w!,. ]*\}", _colored),
    (r"(?<=[\d.])\s*[xX]\s*(?=10\s*\^)", r"\\cdot "),
    (r"\u6216\u8005?", " or "),
    (r"[\u548c\u4e0e\u53ca\u4e14]", " and "),
    (r"\\(?:underline|underbar|mathbf|boldsymbol|bm|mathit|mathsf|mathcal|bf)(?![A-Za-z])", ""),
    (r"<=|=<", r"\\le "),
    (r">=", r"\\ge "),
    (r"!=|\\not\s*=", r"\\ne "),
    (r"\\not\s*\\in(?![A-Za-z])", r"\\notin "),
    (r"\\([A-Za-z]+)", lambda match: _COMMANDS.get(match[1], match[0])),
    (r"\^\s*\{?\\text\s*\{o\}\}?|(?<=\d)\^\s*(?:\{\s*o\s*\}|o(?![A-Za-z]))", r"^\\circ "),
    (r"(?<=[)\]])\s*U\s*(?=[(\[][^()\[\]]*,)", r" \\cup "),
    (r"(?<![\d.,'])\d{1,3}(?:'\d{3})+(?![\d'])", lambda match: match[0].replace("'", "")),
    (r"(?i:^\*\*\s*((?:the\s+)?(?:final\s+)?answer)(?:\s+is)?\s*:?\s*\*\*\s*:?)", r"\1: "),
    (r"\\\*", r"\\cdot "),
    (r"\{([^{}]*)\\over(?![A-Za-z])([^{}]*)\}", r"\\frac{\1}{\2}"),
    (r"\{([^{}]*)\\choose(?![A-Za-z])([^{}]*)\}", r"\\binom{\1}{\2}"),
    (r"\\begin\s*\{\s*array\s*\}\s*\{[^{}]*\}", r"\\begin{array}"),
    (r"[(\[]\s*\\begin\{array\}([^()\[\]]*)\\end\s*\{\s*array\s*\}\s*[)\]]", r"\\begin{pmatrix}\1\\end{pmatrix}"),
    (r"(?<!\\)\$(\^[^$]*)\$", r"\1"),
    # Dollar signs around a part of the text, as in $5$ cm, but not in $5 and $10, where the second closes nothing.
    (r"(?<![\\\w$])\$([^\s$](?:[^$]*[^\s$\\])?)\$(?![\d$])", r"\1"),
    (r"(?<=[\d,}+])\s*\.{3,}", r"\\ldots "),
    (r"(?<![\d.])(\d+)\.(\d{3,60})\s*\\[lc]?dots(?![A-Za-z])", _repeating),
    (r"\\([%$#&])", r"\1"),
    (r"\*\*", "^"),
    (
        r"\\(?:begin|end)\s*\{\s*(?:bmatrix|Bmatrix|smallmatrix|matrix)\s*\}",
        lambda m: m[0][: m[0].index("{")] + "{pmatrix}",
    ),
    (rf"(?<![\\A-Za-z])({FUNCTIONS}|sqrt|pi|infty)(?![A-Za-z])", r"\\\1 "),
    (r"(?<![\\A-Za-z])(?:infinity|inf)(?![A-Za-z])", r"\\infty "),
    # Last, because earlier rules leave spaces.
    (r"\s+", " "),
    (r"(?<=\()\s+|\s+(?=\))|(?<=\{)\s+(?!\w*\})|\s+(?=\})", ""),
)
_INTERVAL_ENDS: Final = r"[^\[\](),;]+[,;]\s*[^\s\[\](),;][^\[\](),;]*"
_OUTWARD_BRACKETS: Final = _rules(
    (rf"\]({_INTERVAL_ENDS})\[", r"(\1)"),
    (rf"\]({_INTERVAL_ENDS})(?=[\])])", r"(\1"),
    (rf"(?<=[\[(])({_INTERVAL_ENDS})\[", r"\1)"),
)
"""Intervals with outward brackets for open ends, `]1,2]`, rewritten with parentheses."""
_BEFORE_SPACES: Final = re.compile(r"(?<![\w.,}])\d{1,3}(?: \d{3})+(?![\d/]| \d| ?/)")
_THOUSANDS: Final = re.compile(r"(?<![\d.,])(?!0)\d{1,3}(?:,\d{3})+(?![\d,])")
_MIXED: Final = re.compile(r"(?<![\d./)}^_])(\d+) (\d+) ?/ ?(\d+)(?!\.?\d)")
_DELIMITERS: Final = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("**", "**"), ("`", "`"), ('"', '"'))


def clean(text: str, *, join_thousands: bool = True) -> str:
    """The text in one spelling; OverLimitError beyond `MAX_CHARACTERS` characters or a nesting of `MAX_DEPTH`.

    With `join_thousands`, `81,256` is one number; without it, two numbers, but `81,056` is still one.
    """
    if len(text) > MAX_RAW_CHARACTERS:
        raise OverLimitError(f"{len(text)} characters")
    text = _undelimited(_plain_characters(text))
    for pattern, replacement in _LATEX_RULES:
        text = pattern.sub(replacement, text)
    text = _undelimited(without_environment(text.strip()))
    text = without_redundant_brackets(_with_parentheses(text))
    if len(text) > MAX_CHARACTERS or nesting(text) > MAX_DEPTH:
        raise OverLimitError(f"{len(text)} characters, {nesting(text)} deep")
    text = _BEFORE_SPACES.sub(lambda match: match[0].replace(" ", ""), text)
    text = _MIXED.sub(_mixed, text)
    return _joined_thousands(text, everywhere=join_thousands)


def without_redundant_brackets(text: str) -> str:
    """`((x))` as `(x)`, `{{x}}` as `{x}`; linear in the text."""
    closing, opened = {}, []
    for position, character in enumerate(text):
        if character in "({":
            opened.append(position)
        elif character in ")}" and opened and text[opened[-1]] + character in ("()", "{}"):
            closing[opened.pop()] = position
    redundant = {
        position
        for start, end in closing.items()
        if text[start] == text[start - 1 : start] and closing.get(start - 1) == end + 1
        for position in (start, end)
        if start < 2 or text[start - 2] != "\\"
    }
    return "".join(character for position, character in enumerate(text) if position not in redundant)


def _with_parentheses(text: str) -> str:
    depth = 0
    for character in text:
        depth += (character in "([") - (character in ")]")
        if depth < 0:
            break
    if depth:  # brackets that close before they open, or never
        for pattern, replacement in _OUTWARD_BRACKETS:
            text = pattern.sub(replacement, text)
    return text


def _plain_characters(text: str) -> str:
    text = _RAISED.sub(lambda match: "^{" + unicodedata.normalize("NFKC", match[0]) + "}", text)
    text = _LOWERED.sub(lambda match: "_{" + unicodedata.normalize("NFKC", match[0]) + "}", text)
    text = spelled_fractions(text)
    text = unicodedata.normalize("NFKC", text.translate(_CHARACTERS)).translate(_CHARACTERS)
    return "".join(
        str(unicodedata.decimal(character)) if character.isdecimal() else character
        for character in text
        if unicodedata.category(character) not in ("Cf", "Cc") or character in "\n\t"
    )


def spelled_fractions(text: str) -> str:
    r"""The text with `½` as `\frac{1}{2}`."""
    return _VULGAR.sub(_vulgar_fraction, text)


def _vulgar_fraction(match: re.Match[str]) -> str:
    numerator, _, denominator = unicodedata.normalize("NFKC", match[0]).partition("\u2044")
    return rf"\frac{{{numerator}}}{{{denominator}}}"


def _mixed(match: re.Match[str]) -> str:
    whole, numerator, denominator = match.groups()
    # 3 4/2 is neither a mixed number nor a product.
    return rf"{whole}\frac{{{numerator}}}{{{denominator}}}" if 0 < int(numerator) < int(denominator) else match[0]


def _undelimited(text: str) -> str:
    text = text.strip()
    if text.endswith(("$.", r"\).", r"\].")):
        text = text[:-1]
    for start, end in _DELIMITERS:
        inside = text[len(start) : -len(end)]
        if (
            len(text) > len(start) + len(end)
            and text.startswith(start)
            and text.endswith(end)
            and not text.endswith("\\" + end)
            and end not in inside.replace("\\" + end, "")
        ):
            return _undelimited(inside)
    return text


def _joined_thousands(text: str, *, everywhere: bool) -> str:
    # In round, square and set brackets, commas separate items unless the rest cannot begin an item: (1,234) has two.
    def joined(match: re.Match[str]) -> str:
        before = text[: match.start()]
        inside = sum(before.count(opening) for opening in ("(", "[", r"\{"))
        inside -= sum(before.count(closing) for closing in (")", "]", r"\}"))
        one = (inside <= 0 and everywhere) or any(group.startswith("0") for group in match[0].split(",")[1:])
        return match[0].replace(",", "") if one else match[0]

    return _THOUSANDS.sub(joined, text)


def without_environment(text: str) -> str:
    r"""The lines of an environment that is the whole text, in one line: `x = 1, y = 2`, `x = 2+3 = 5`.

    Alignment marks are removed only beside a relation: `5 & x>0` in `cases` is a value with a condition, and in `array`
    a row of two cells. Such texts, and columns of an `array` without relations, stay unchanged.
    """
    match = _ENVIRONMENT.match(text)
    if match is None:
        return text
    if r"\begin" in match["body"]:  # a matrix, whose rows are not rows of this environment
        around = _INNER_ENVIRONMENT.sub("", match["body"])
        return text if re.search(rf"[&{ROW_END}]|\\begin|\\end", around) else match["body"].strip()
    rows = []
    for row in match["body"].split(ROW_END):
        for alignment, replacement in _ALIGNMENT:
            row = alignment.sub(replacement, row)
        row = row.strip().removeprefix("&").strip(" ,;")
        if row:
            rows.append(row)
    if not rows or any("&" in row for row in rows):
        return text
    if match["name"] == "array" and len(rows) > 1 and not all(map(_RELATION.search, rows)):
        return text
    joined = rows[0]
    for row in rows[1:]:
        separator = " " if _GOES_ON.match(row) else ", "
        joined += separator + row
    return joined
