"""What of a completion a judge sees, and what is worth nothing without asking one."""

from __future__ import annotations

import re
import unicodedata
from typing import TYPE_CHECKING, Final, Literal

from flatpeak.rewards.number import last_boxed
from flatpeak.utils.answers import after_thinking, judged_text, last_answer

if TYPE_CHECKING:
    from flatpeak.types import Completion, Prompt

Show = Literal["final_answer", "whole"]

# Openers that made judges say "correct" with nothing after them: Zhao et al. 2025, "One Token to Fool LLM-as-a-Judge",
# arXiv 2507.08794, and their like.
_OPENERS: Final = frozenset(
    {
        *("thought process", "lets solve this problem step by step", "let us solve this problem step by step"),
        *("lets think step by step", "let me think", "lets think", "step by step", "lets solve this", "lets see"),
        *("solution", "the solution", "solution is", "the solution is", "answer", "the answer", "the answer is"),
        *("final answer", "the final answer is", "here is the answer", "here is the solution", "explanation"),
        *("sure", "okay", "ok", "alright", "well", "certainly", "of course", "hmm", "step 1", "first", "reasoning"),
        *(
            "解",
            "解答",
            "答案",
            "かいせつ",
            "解説",
            "respuesta",
            "la respuesta es",
            "solución",
            "réponse",
            "lösung",
            "antwort",
        ),
    }
)
_APOSTROPHES: Final = re.compile(r"['\u2019\u02bc]")
_OTHERS: Final = re.compile(r"[\W_]+")


def shown_text(completion: Completion, prompt: Prompt, *, show: Show) -> str:
    """The final answer, or the whole completion.

    The final answer is what stands after the thinking: of that the last answer block, else the last balanced box, else
    all of it. A completion cut in the middle of its thinking has none.
    """
    if show == "whole":
        return completion.text
    text = judged_text(completion, prompt)
    tagged = last_answer(text)
    if tagged is not None:
        return tagged.strip()
    rest = after_thinking(text)
    boxed = last_boxed(rest)
    return (rest if boxed is None else boxed).strip()


def normal_form(text: str) -> str:
    """Case, punctuation and spaces made equal."""
    plain = _APOSTROPHES.sub("", unicodedata.normalize("NFKC", text).casefold())
    return _OTHERS.sub(" ", plain).strip()


def worthless(text: str, reference: str) -> str | None:
    """Why a text scores 0 without a call: `empty`, `punctuation` or `opener`; None for everything else.

    Numbers, letters and symbols are answers however short they are, and so is whatever the reference says: "Solution"
    may be the right word.
    """
    stripped = text.strip()
    if stripped and stripped.casefold() == reference.strip().casefold():
        return None
    # Letters, numbers and symbols; the rest is punctuation, space, marks and control characters.
    if not any(unicodedata.category(character)[0] in "LNS" for character in stripped):
        return "punctuation" if any(unicodedata.category(c)[0] == "P" for c in stripped) else "empty"
    form = normal_form(stripped)
    return "opener" if form in _OPENERS and form != normal_form(reference) else None
