r"""Answers set over several lines: `aligned`, `cases` and `array` around one value, a derivation or a system."""

from __future__ import annotations

import re
from typing import Final

ROW_END: Final = "\ue000"
"""Stands for the end of a row. From the private use area, which no answer has anything to say in."""

_ENVIRONMENT: Final = re.compile(
    r"^(?:\\\{\s*)?\\begin\s*\{\s*(?P<name>aligned|align|gathered|gather|split|equation|d?cases|rcases|array)(?P<star>\*?)\s*\}"
    r"(?P<body>(?:(?!\\(?:begin|end)\s*\{\s*(?P=name)).)*)\\end\s*\{\s*(?P=name)(?P=star)\s*\}\s*(?:\\\})?$",
    re.DOTALL,
)
_WITHIN: Final = re.compile(
    r"\\begin\s*\{\s*(?P<name>[A-Za-z]+\*?)\s*\}(?:(?!\\begin|\\end).)*\\end\s*\{\s*(?P=name)\s*\}", re.DOTALL
)
_SIGN: Final = r"(?:[=<>]|\\(?:le|ge|ne|approx|in|Rightarrow)(?![A-Za-z]))"
_RELATION: Final = re.compile(_SIGN)
_GOES_ON: Final = re.compile(rf"^\s*{_SIGN}")
_MARKS: Final = ((re.compile(rf"\s*&\s*(?={_SIGN})"), " "), (re.compile(rf"(?P<sign>{_SIGN})\s*&"), r"\g<sign>"))


def without_environment(text: str) -> str:
    r"""The lines of an environment that is the whole text, in one line: `x = 1, y = 2`, `x = 2+3 = 5`.

    Alignment marks count only beside a relation: `5 & x>0` in `cases` is a value with a condition, and in `array` a
    row of two cells. Such texts, and columns of an `array` without relations, stay as they are.
    """
    match = _ENVIRONMENT.match(text)
    if match is None:
        return text
    if r"\begin" in match["body"]:  # a matrix, whose rows are not this one's
        around = _WITHIN.sub("", match["body"])
        return text if re.search(rf"[&{ROW_END}]|\\begin|\\end", around) else match["body"].strip()
    rows = []
    for row in match["body"].split(ROW_END):
        for mark, replacement in _MARKS:
            row = mark.sub(replacement, row)
        row = row.strip().removeprefix("&").strip(" ,;")
        if row:
            rows.append(row)
    if not rows or any("&" in row for row in rows):
        return text
    if match["name"] == "array" and len(rows) > 1 and not all(map(_RELATION.search, rows)):
        return text
    joined = rows[0]
    for row in rows[1:]:
        joined += f" {row}" if _GOES_ON.match(row) else f", {row}"
    return joined
