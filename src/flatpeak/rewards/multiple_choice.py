"""The reward for multiple-choice questions, and three ways to read the letter of an answer."""

from __future__ import annotations

import random
import re
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from string import ascii_letters, ascii_uppercase
from typing import TYPE_CHECKING, Final

from flatpeak.errors import UserError
from flatpeak.rewards.base import Rule
from flatpeak.utils.answers import after_thinking, judged_text, last_answer, last_boxed

if TYPE_CHECKING:
    from flatpeak.rewards.base import ChoiceExtraction
    from flatpeak.types import Completion, Prompt, Score

_WIDE: Final = str.maketrans(
    {"（": "(", "）": ")", "：": ":", "．": ".", "。": ". ", "，": ", ", "；": "; ", "！": "! ", "、": ", "}
    | {chr(ord(letter) + 0xFEE0): letter for letter in ascii_letters}
)
_TEXT_COMMAND: Final = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathsf)\s?\{([^{}]{0,80})\}")
_MARKUP: Final = re.compile(r"[*$`_]|\\[()\[\],;! ]")
_BOX: Final = re.compile(r"\\(?:boxed|fbox)\s?\{([^{}]{0,200})\}")

_SAID: Final = re.compile(
    r"(?:\b(?:answer|choice|option)(?: (?:to|for|here|among|of|from)\b[^.;:?!\n]{0,40}?)?"
    r"(?: is\b| would be\b| must be\b| should be\b| has to be\b|\s?:|\s=|\s?->|\s?→)+"
    r"|答案\s?(?:应该|应|就)?\s?(?:是|为|选(?!项)|:)+(?:选项)?|(?<!不)(?:故|应该|应|因此|所以)选择?\s?:?)\s{0,4}"
    r"(?=(?P<said>[^\n]{0,120}))",
    re.IGNORECASE,
)
_CALLED_RIGHT: Final = re.compile(
    r"(?:(?<!\w)(?:option|choice|answer|letter) [(\[]?(?P<named>[A-Za-z])[)\]]?"
    r"|(?<!\w)[(\[](?P<bracketed>[A-Za-z])[)\]]"
    r"|(?:^|[.!,;:]\s|\b(?:so|thus|hence|therefore|only|that|conclude)\s)\s?(?P<bare>(?-i:[A-Z])))"
    r" is (?:the )?(?:correct|right|best)(?: answer| choice| option| one)?"
    r"(?=[.!\s]{0,3}(?:$|\n)|[.!]\s|,? (?:because|since|as)\b)",
    re.IGNORECASE | re.MULTILINE,
)
_CALLED: Final = re.compile(r"\b(?:it|this|that)(?: is\b|['’]s\b| would be\b| must be\b)\s{0,4}", re.IGNORECASE)
_MARKED: Final = re.compile(r"\s{0,8}#{4}\s(?P<stated>.*)")
_AT_THE_END: Final = re.compile(r"(?<![\w)])[(\[](?P<letter>[A-Z])[)\]][.!]?\s{0,8}\Z")

_SUPPOSED: Final = re.compile(
    r"\b(?:if|whether|unless|suppose|supposing|assume|assuming)\b[^.;,\n]{0,25}\Z|"
    r"\b(?:wrong|incorrect|other|another) \Z",
    re.IGNORECASE,
)
_DENIED: Final = re.compile(
    r"\b(?:not|neither|never|nor|wrong|incorrect|cannot|unclear|unlikely)\b|n['’]t\b", re.IGNORECASE
)
_BUT: Final = re.compile(r"\bbut\b", re.IGNORECASE)
_CLAUSE_END: Final = re.compile(r"[.!?](?=\s|$)|[,;:\n]|\bbut\b", re.IGNORECASE)
_SENTENCE_END: Final = re.compile(r"[.!?](?=\s|$)")

_DIRECT: Final = re.compile(
    r"(?P<named>(?:definitely |clearly |probably |(?:most )?likely |indeed |actually |therefore )?"
    r"(?:the )?(?:option |choice |letter )?)"
    r"['\"“‘]?(?:(?P<letter>[A-Za-z])(?!(?![\u4e00-\u9fff])[\w-]|['’]\w)|[(\[{]\s?(?P<bracketed>[A-Za-z])\s?[)\]}])['\"”’]?",
    re.IGNORECASE,
)
_BRACKETED: Final = re.compile(r"(?<![\w)])[(\[](?P<letter>[A-Za-z])[)\]]")
_GOES_ON: Final = re.compile(
    r"\s?(?:[.,;:!)\]<]|\s[-–—]|$|(?:because|since|as|for|which|due|so|and|or|is|but|rather than|instead of)\b|[/&]"
    r"|选?项|因|由于|和|或)"
)
_ENDS: Final = re.compile(r"\s?(?:[.,;:!)\]<]|$)")
_ANOTHER: Final = re.compile(
    r"\s?(?:[.;!?]\s(?=[Oo]r\b))?(?:,|/|&|\b[Oo]r\b|\band\b|和|或){1,2}\s?(?:,? ?(?:or|and) )?"
    r"(?:option |choice |maybe |possibly |perhaps )?"
    r"(?:[(\[](?P<bracketed>[A-Za-z])[)\]]|(?P<letter>[A-Z])(?!\w))(?P<rest>.{0,12})"
    r"|\s?[(\[](?P<beside>[A-Z])[)\]](?P<after>.{0,12})",
    re.DOTALL,
)
_BEFORE_WORDS: Final = re.compile(r"[\s)\].:,]*(?:[-–—]\s+)?")
_WORDS_END: Final = re.compile(r"[\"'”’)]*(?:[.!\s]*$|[.!]\s)")
_LAST_MENTIONS: Final = 20
"""Mentions, counted from the end, in which the words of an option are searched: limits the cost."""

_JOINED: Final = re.compile(r"\b(?:or|and|any|one|all|either|both|of)\b|[^\w]")
_SUBJECT: Final = re.compile(r"\s(?:is|was|has|does|would|can)")
_WHOLE: Final = re.compile(r"[(\[{\"'“]?\s?(?P<letter>[A-Za-z])\s?[)\]}\"'”]?[.:,!]?")
_LABELED: Final = re.compile(r"[(\[]?(?P<letter>[A-Za-z])(?:[)\].:]+|\s[-–—])(?P<text>\s.*)", re.DOTALL)
_NAMED: Final = re.compile(r"\s*(?:option|choice)\s(?=[(\[]?[A-Za-z](?!\w))", re.IGNORECASE)
_LETTER: Final = re.compile(r"[a-z]")
_LONE: Final = re.compile(r"(?<!\w)[A-Z](?!\w)")

UNKNOWN_OPTIONS: Final = 10
"""Options assumed for a question whose row has no column `options`: A to J."""
GUESS_SEED: Final = 12345

# MMLU-Pro's published extraction has the patterns
#   answer is \(?([A-J])\)?      .*[aA]nswer:\s*([A-J])      \b[A-J]\b(?!.*\b[A-J]\b)
# The last two take time quadratic in the text; the patterns here find the same letters in linear time.
_OFFICIAL_ANSWER_IS: Final = re.compile(r"answer is \(?([A-J])")
_OFFICIAL_COLON: Final = re.compile(r"(?=[aA]nswer:\s*([A-J]))")
_OFFICIAL_LONE: Final = re.compile(r"\b[A-J]\b")

_FIRST_LETTER: Final = re.compile(r"\s*\(?([A-Z])(?!\w)")


@dataclass(frozen=True, slots=True)
class _Statement:
    at: int
    """Position in the text."""
    letter: str | None
    """None if several options are named."""


def answer_letter(text: str, *, options: Sequence[str] | None, unknown: int = 10) -> str | None:
    """The letter that the text states last, as a capital; None if it states none, or several at once.

    `options` are the question's, in the order of their letters; None means a question with `unknown` options.
    """
    reader = _Reader(options, ascii_uppercase[: unknown if options is None else len(options)])
    block = last_answer(text)
    if block is not None:
        return reader.of_block(_plain(block))
    return reader.last(_plain(after_thinking(text)))


def _plain(text: str) -> str:
    """The text without marks that only decorate a letter."""
    return _MARKUP.sub("", _TEXT_COMMAND.sub(r"\1", text.translate(_WIDE)))


class _Reader:
    """Reads answers to one question."""

    def __init__(self, options: Sequence[str] | None, letters: str) -> None:
        self._texts = None if options is None else [_normal(option) for option in options]
        self._letters = letters
        self._longest_first = sorted(filter(None, self._texts or ()), key=len, reverse=True)
        self._reach = 2 * max(map(len, self._longest_first), default=0) + 40

    def of_block(self, content: str) -> str | None:
        """The letter of an answer block: alone, with its option written out, or stated in a text."""
        return self._one_option(content, any_text=True) or self.last(content)

    def last(self, text: str) -> str | None:
        latest = max(self._statements(text), key=lambda statement: statement.at, default=None)
        return self._in_words(text) if latest is None else latest.letter

    def _statements(self, text: str) -> Iterator[_Statement]:
        yield from self._lines(text)
        for box in _BOX.finditer(text):
            letter = self._one_option(box[1], any_text=True)
            if letter is not None:
                yield _Statement(box.start(), letter)
        for said in _SAID.finditer(text):
            if not _SUPPOSED.search(text[max(0, said.start() - 40) : said.start()]):
                yield from self._said(text, said["said"], at=said.start("said"))
        for called in _CALLED_RIGHT.finditer(text):
            letter = self._known(called["named"] or called["bracketed"] or called["bare"])
            at = max(called.start(), called.start("bare"))
            clause = _CLAUSE_END.split(text[max(0, at - 80) : at])[-1]
            if letter is not None and not _DENIED.search(clause) and not _SUPPOSED.search(clause):
                yield _Statement(at, letter)
        ending = _AT_THE_END.search(text, max(0, len(text) - 20))
        if ending is not None:
            sentence = _SENTENCE_END.split(text[max(0, ending.start() - 80) : ending.start()])[-1]
            letter = self._known(ending["letter"])
            if letter is not None and not _DENIED.search(sentence) and not _BRACKETED.search(sentence):
                yield _Statement(ending.start(), letter)

    def _said(self, text: str, said: str, *, at: int) -> Iterator[_Statement]:
        """Statements after `the answer is`: an option, its letter, or a letter in parentheses later in the sentence."""
        named = self._begins_with(text, at)
        if named is not None and _LETTER.fullmatch(self._option(named)) is None:
            yield _Statement(at, named)
            return
        direct = _DIRECT.match(said)
        if direct is not None:
            letter = self._known(direct["letter"] or direct["bracketed"])
            if letter is not None and (direct["bracketed"] or self._stands_alone(direct, said)):
                yield self._unless_another(letter, text, said[direct.end() :], at=at + direct.end())
                return
        sentence = _SENTENCE_END.split(said)[0]
        for match in _BRACKETED.finditer(sentence):
            letter = self._known(match["letter"])
            # In `not (A) but (C)`, the part after `but` is not denied.
            if letter is not None and not _DENIED.search(_BUT.split(sentence[: match.start()])[-1]):
                yield self._unless_another(letter, text, said[match.end() :], at=at + match.end())
                return

    def _stands_alone(self, direct: re.Match[str], said: str) -> bool:
        """Whether it is a letter: A is an article, I a pronoun, unless the sentence ends or goes on after it."""
        small = direct["letter"].islower() and not direct["named"].strip()
        return (_ENDS if small else _GOES_ON).match(said, direct.end()) is not None

    def _unless_another(self, letter: str, text: str, rest: str, *, at: int) -> _Statement:
        """A statement of the letter, or of none if the text continues with `or (D)`, `/D`, `(D)` or another option."""
        words = _BEFORE_WORDS.match(text, at)
        if self._begins_with(text, words.end() if words else at) not in (None, letter):
            return _Statement(at, None)
        other = _ANOTHER.match(rest)
        if other is None:
            return _Statement(at, letter)
        second, after = self._known(other["bracketed"] or other["letter"] or other["beside"]), other["rest"]
        after = (other["after"] if after is None else after).lstrip("'\"”’")
        named = second is not None and second != letter and not _SUBJECT.match(after)
        return _Statement(at, None if named and (other["letter"] is None or _GOES_ON.match(after)) else letter)

    def _lines(self, text: str) -> Iterator[_Statement]:
        """Lines that are a letter, and the only option that the text writes out in a line or marks with `####`."""
        at = 0
        written: list[_Statement] = []
        marked: list[_Statement] = []
        before: set[str] = set()
        for line in text.split("\n"):
            if len(line) <= 2000 and line.strip():
                letter, mark = self._alone(line), _MARKED.match(line)
                # If letters are in consecutive lines, none of them is the answer.
                before = {*before, letter} if letter is not None else set()
                if letter is not None:
                    yield _Statement(at, letter if len(before) == 1 else None)
                elif mark is not None and (letter := self._one_option(mark["stated"], any_text=False)) is not None:
                    marked.append(_Statement(at, letter))
                elif (letter := self._written_out(line, any_text=False)) is not None:
                    written.append(_Statement(at, letter))
            at += len(line) + 1
        # Several are a repetition of the question's options, or headings.
        for statements in (written, marked):
            if len({statement.letter for statement in statements}) == 1:
                yield statements[-1]

    def _in_words(self, text: str) -> str | None:
        """The option that the text states last in the option's words, without its letter."""
        mentions = [(len(text), self._named_by(whole)) for whole in (text, text.rstrip().rpartition("\n")[2])]
        mentions += [(box.start(), self._named_by(box[1])) for box in deque(_BOX.finditer(text), maxlen=_LAST_MENTIONS)]
        mentions.append((text.rfind("\\boxed"), self._named_by(last_boxed(text) or "")))  # also if braces are inside
        for called in deque(_CALLED.finditer(text), maxlen=_LAST_MENTIONS):
            if not _SUPPOSED.search(text[max(0, called.start() - 40) : called.start()]):
                mentions.append((called.end(), self._begins_with(text, called.end())))
        return max(((at, letter) for at, letter in mentions if letter is not None), default=(0, None))[1]

    def _begins_with(self, text: str, at: int) -> str | None:
        """The letter of the option whose words begin at a position, if a sentence or line ends after them."""
        line = text[at : at + self._reach].lstrip().partition("\n")[0]
        words = " ".join(line.casefold().split()).lstrip("\"'“‘")
        for option in self._longest_first:
            if words.startswith(option) and _WORDS_END.match(words, len(option)):
                return self._named_by(option)
        return None

    def _option(self, letter: str) -> str:
        return self._texts[self._letters.index(letter)] if self._texts is not None else ""

    def _named_by(self, text: str) -> str | None:
        """The letter of the option whose words are the whole text."""
        words = _normal(text) if len(text) <= 2000 else ""
        if not words or not self._texts or self._texts.count(words) != 1:
            return None
        return self._letters[self._texts.index(words)]

    def _one_option(self, text: str, *, any_text: bool) -> str | None:
        if any_text:  # in lines, `Option A` is a heading
            text = _NAMED.sub("", text, count=1) if _NAMED.match(text) else text
        return self._alone(text) or self._written_out(text, any_text=any_text)

    def _alone(self, text: str) -> str | None:
        """The letter, if the whole text is a letter: `C`, `(c)`, `C.`"""
        match = _WHOLE.fullmatch(text.strip()) if len(text) <= 2000 else None
        return None if match is None else self._known(match["letter"])

    def _written_out(self, text: str, *, any_text: bool) -> str | None:
        """The letter before an option, `C. Paris`; with `any_text`, before any words without another letter."""
        match = _LABELED.fullmatch(text.strip()) if len(text) <= 2000 else None
        letter = None if match is None else self._known(match["letter"])
        if match is None or letter is None:
            return None
        words = _normal(match["text"])
        if self._texts is not None and words and words in self._texts:
            return letter if words == self._option(letter) else None
        return letter if any_text and not _LONE.search(match["text"]) and not self._are_options(words) else None

    def _are_options(self, words: str) -> bool:
        """Whether a text only lists several options: `any of paris, rome`."""
        for option in self._longest_first:
            words = re.sub(rf"(?<!\w){re.escape(option)}(?!\w)", " ", words)
        return bool(self._longest_first) and not _JOINED.sub("", words)

    def _known(self, letter: str) -> str | None:
        letter = letter.upper()
        return letter if letter in self._letters else None


def _normal(option: str) -> str:
    return " ".join(_plain(option).casefold().split()).rstrip(".")


def official_letter(text: str) -> str | None:
    """MMLU-Pro's published extraction (TIGER-AI-Lab/MMLU-Pro, `evaluate_from_local.py`), with its quirks.

    The first `answer is (X)`; else, in the first line with an `answer: X`, the last one; else the last single capital
    from A to J. So `answer is Definitely (C)` is D, a hypothesis before the conclusion wins, the pronoun I is an
    answer, and lower-case letters never are.
    """
    sentence = _OFFICIAL_ANSWER_IS.search(text)
    if sentence is not None:
        return sentence[1]
    after_colon = _official_colon(text)
    if after_colon is not None:
        return after_colon
    lone = deque(_OFFICIAL_LONE.finditer(text), maxlen=1)
    return lone[0].group() if lone else None


def _official_colon(text: str) -> str | None:
    letter, line_end = None, -1
    for match in _OFFICIAL_COLON.finditer(text):
        if letter is None:
            line_end = text.find("\n", match.start())
        elif 0 <= line_end < match.start():
            break
        letter = match[1]
    return letter


def first_letter(text: str) -> str | None:
    """The capital at the beginning of the text, ignoring spaces and a parenthesis; else None."""
    match = _FIRST_LETTER.match(text)
    return None if match is None else match[1]


@dataclass(frozen=True, kw_only=True, slots=True)
class ChoiceReward(Rule):
    """1 if the extracted letter is the row's gold letter, else 0.

    - `robust`: the letter that the completion states last, after its thinking (`flatpeak.rewards.multiple_choice`).
    - `letter`: the letter at the beginning, if the question has it, as after the `Answer:` of MMLU's prompts.
    - `official`: MMLU-Pro's extraction, on the whole text. If that finds no letter, the published script draws an
    option
      at random, from a generator seeded with 12345 for each question; so does this, and the draw may score 1. It does
      not count as an extracted answer.
    """

    extraction: ChoiceExtraction = "robust"

    def __call__(self, completion: Completion, prompt: Prompt) -> Score:
        """1.0 or 0.0; UserError with the row's name if the gold answer is not one of the question's letters."""
        letters = _letters(_options(prompt))
        gold = prompt.example.gold
        if len(gold) != 1 or gold not in letters:
            raise UserError(
                f"the gold answer {gold[:80]!r} of row {prompt.id!r} is not a letter from A to {letters[-1]}: use a "
                "multiple-choice task (task.type=choices, mmlu or mmlu_pro), or another reward type"
            )
        letter = self.answer(completion, prompt)
        if letter is None and self.extraction == "official":
            letter = letters[random.Random(GUESS_SEED).randint(0, len(letters) - 1)]
        return float(letter == gold)

    def answer(self, completion: Completion, prompt: Prompt) -> str | None:
        """The extracted letter, or None, for majority votes and the rate of failed extractions."""
        options = _options(prompt)
        match self.extraction:
            case "robust":
                return answer_letter(judged_text(completion, prompt), options=options, unknown=UNKNOWN_OPTIONS)
            case "letter":
                letter = first_letter(completion.text)
                return letter if letter is not None and letter in _letters(options) else None
            case "official":
                return official_letter(completion.text)


def _options(prompt: Prompt) -> list[str] | None:
    """The options in the order of their letters, if the row has them in its column `options`."""
    options = prompt.example.columns.get("options")
    return [str(option) for option in options] if isinstance(options, list | tuple) and options else None


def _letters(options: list[str] | None) -> str:
    return ascii_uppercase[: UNKNOWN_OPTIONS if options is None else len(options)]
