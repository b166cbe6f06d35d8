"""Which parts of a question a perturbation may touch: not its numbers, formulas, code, options or labels."""

from __future__ import annotations

import re
from collections.abc import Iterator

# The first option's line, where a line of the second follows; options may have several lines.
_OPTIONS = re.compile(
    r"^[ \t]*(?:Options|Choices):[ \t]*$|^[ \t]*(\(?)A([.)])[ \t]+\S(?=.*?\n[ \t]*\1B\2[ \t]+\S)",
    re.MULTILINE | re.DOTALL,
)
_LABEL = re.compile(r"^\s*(?:Question|Problem|Q):\s*")
_ANSWER = re.compile(r"\n\s*(?:Answer|A|Solution):[^\n]*\s*$")
PROTECTED = re.compile(
    r"```.*?```|`[^`\n]*`"
    r"|\$\$.*?\$\$|\\\[.*?\\\]|\\\(.*?\\\)|\\begin\{(\w+\*?)\}.*?\\end\{\1\}"
    # A dollar sign before a number is money, unless a formula closes on the same line.
    r"|\$(?![\s\d])[^$\n]*\$|\$\d[^$\n]*?[\\^_={}+*/<>][^$\n]*\$"
    r"|\\[A-Za-z]+\s*(?:\{[^{}]*\})*"
    r"|https?://\S+|\S*[\w/]\.\w+\(\S*|\{[^{}\n]*\}"
    r"|[^\s]*[\d_^=<>\\@#|][^\s]*",
    re.DOTALL,
)
_ABBREVIATION = re.compile(r"(?:\b(?:Mr|Mrs|Ms|Dr|St|Prof|Jr|Sr|vs|etc|approx|e\.g|i\.e|[A-Z])|[ap]\.m)\.$")
_END = re.compile(r"[.!?][\"')\u201d]*(?=\s)")


def split_question(question: str) -> tuple[str, str, str]:
    """(label, text, tail): what is asked, between a leading `Question:` and the options or a final `Answer:`."""
    label = _LABEL.match(question)
    start = label.end() if label else 0
    found = _OPTIONS.search(question, start) or _ANSWER.search(question, start)
    end = found.start() if found else len(question)
    while end > start and question[end - 1].isspace():
        end -= 1
    return question[:start], question[start:end], question[end:]


def protected(text: str) -> list[tuple[int, int]]:
    """Where numbers, LaTeX and code stand, in order."""
    return [match.span() for match in PROTECTED.finditer(text)]


def words(text: str, *, at_least: int) -> Iterator[re.Match[str]]:
    """Words of so many letters outside of what is protected."""
    spans = protected(text)
    for match in re.finditer(rf"[^\W\d_]{{{at_least},}}", text):
        if not any(start < match.end() and match.start() < end for start, end in spans):
            yield match


def last_sentence(text: str) -> int:
    """Where the last question begins, or the last sentence where nothing is asked; 0 where there is but one."""
    spans = protected(text)
    starts = [0]
    for match in _END.finditer(text):
        inside = any(start < match.start() < end - 1 for start, end in spans)
        if not inside and not _ABBREVIATION.search(text[: match.start() + 1]):
            starts.append(match.end() + len(text[match.end() :]) - len(text[match.end() :].lstrip()))
    starts = [start for start in starts if start < len(text)]
    ends = [*starts[1:], len(text)]
    asked = [start for start, end in zip(starts, ends, strict=True) if text[start:end].rstrip("\"') \n").endswith("?")]
    return (asked or starts)[-1] if starts else 0


_WOMEN = (
    "Abigail Ada Agnes Aisha Alice Alicia Amanda Amelia Amina Amy Ana Andrea Angela Anita Anna Anne Annie Barbara "
    "Beatrice Becky Bella Beth Betty Brenda Bridget Camila Carla Carmen Caroline Carrie Catherine Cecilia Chloe "
    "Christina Cindy Clara Claudia Cynthia Daniela Danielle Deborah Diana Diane Donna Dorothy Edith Elaine Elena "
    "Elisa Eliza Ella Ellen Elsa Emily Emma Erika Esther Eva Fatima Fiona Gabriela Gina Gloria Hannah Heather "
    "Helen Ingrid Irene Isabel Isabella Jane Janet Janice Jasmine Jenna Jenny Jessica Jill Joan Joanna Josephine "
    "Judy Julia Juliana Julie Karen Kate Katie Kayla Kelly Laura Leah Leila Lena Linda Lisa Lola Louise Lucia "
    "Lucy Lydia Madeline Mandy Margaret Maria Mariana Martha Mary Matilda Megan Melissa Mia Michelle Mina Miriam "
    "Molly Monica Nadia Nancy Naomi Natalia Natalie Nicole Nina Nora Olga Olivia Pamela Patricia Paula Peggy "
    "Penelope Priya Rachel Rebecca Rita Rosa Ruth Sally Samantha Sandra Sara Sarah Sofia Sonia Sophia Sophie "
    "Stacy Stella Stephanie Sue Susan Susana Talia Tamara Tanya Tara Tatiana Teresa Tiffany Tina Ursula Valerie "
    "Vanessa Vera Veronica Vivian Wanda Wendy Yasmin Yolanda Zara Zoe"
)
_MEN = (
    "Aaron Adam Adrian Ahmed Alan Albert Alejandro Alex Alfred Anders Andrew Andy Anthony Antonio Arjun "
    "Arthur Barry Ben Benjamin Bernard Bill Billy Bob Bobby Brad Brandon Brian Bruce Bruno Caleb Carl Carlos "
    "Charlie Chris Colin Connor Craig Daniel Danny Dave David Dennis Derek Diego Dominic Donald Douglas Eddie "
    "Edgar Eduardo Edward Elias Eric Ernesto Ethan Eugene Felix Fernando Francis Fred Gabriel Gary George Gerald "
    "Greg Gregory Gustavo Hank Harold Harry Hassan Hector Henry Howard Hugo Ian Ibrahim Isaac Ivan Jack Jacob "
    "Jake James Jason Jayden Jeff Jeremy Jerome Jerry Jesse Jim Jimmy Joe Joel Joey John Johnny Jonas Jonathan "
    "Jorge Jose Joseph Josh Joshua Juan Julian Justin Karl Keith Ken Kenneth Kenny Kevin Kyle Larry Leo Leon "
    "Leonardo Liam Logan Lorenzo Louis Lucas Luis Luke Marco Marcus Mario Martin Marvin Matt Matthew Max Michael "
    "Miguel Mike Mohamed Nathan Neil Nicolas Noah Oliver Omar Oscar Pablo Patrick Paul Pedro Pete Peter Phil "
    "Philip Rafael Ralph Ramon Randy Raul Ray Richard Rick Robert Roberto Roger Ron Ronald Roy Ryan Sam Samuel "
    "Scott Sean Sebastian Simon Stan Stephen Steve Steven Stuart Ted Terry Theodore Thomas Tim Timothy Toby Tom "
    "Tommy Tony Trevor Tyler Victor Vincent Walter William Xavier Zachary"
)
# Each list is of one gender, so that the pronouns of a question still fit.
LISTS = (tuple(_WOMEN.split()), tuple(_MEN.split()))
ALIKE = {name: names for names in LISTS for name in names}
"""For each name the list it is on."""
