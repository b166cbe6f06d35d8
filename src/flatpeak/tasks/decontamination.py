"""Decontamination: near-duplicate questions, a split that keeps them together, and overlap with an evaluation set.

A training question overlaps an evaluation set if, ignoring case, punctuation and spacing,

1. it equals an evaluation question;
2. it contains `ngram` (13) consecutive words of an evaluation question, or the whole of a question with 8 to 12 words
   (Brown et al. 2020, arXiv 2005.14165, appendix C). N-grams that more than 10 evaluation questions share, such as
   "which of the following statements is true about the", are common wording and are ignored; or
3. its word set, with numbers masked, has a Jaccard similarity of at least `similarity` (0.8) to an evaluation
   question's.
"""

from __future__ import annotations

import hashlib
import math
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Final

from pydantic import Field

from flatpeak.tasks.data_files import SourceConfig
from flatpeak.types import Example
from flatpeak.utils.schema import StrictConfig

MIN_WORDS: Final = 8
"""Shorter evaluation questions overlap only with equal questions."""
MAX_SHARED: Final = 10
"""An n-gram in more evaluation questions than this does not identify any of them."""
_MAX_READ: Final = 1_000_000
"""The characters of a question that are split into words; the rest counts as one word, to save time."""
_ROUNDING: Final = 1e-9
_NUMBER: Final = "#"
# A number keeps its inner signs (1.5, 3:4) and a final "!", so that 5! and 5 stay different; a symbol such as + or ( is
# a separate token; the last alternatives leave out punctuation.
_TOKEN: Final = re.compile(r"\.?\d+(?:[.,:/]\d+)*!?|[^\W\d_]+|[^\w\s.,;:!?'\"`’‘“”…]|_")
_THOUSANDS: Final = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_HYPHEN: Final = re.compile(r"(?<=[^\W\d_])-(?=[^\W\d_])")
_DIGIT: Final = re.compile(r"\d")

WordSet = frozenset[str]


class OverlapConfig(StrictConfig):
    """Drop training rows that overlap an evaluation set, by the rule in tasks/decontamination.py."""

    sources: tuple[SourceConfig, ...] = Field(min_length=1)
    """The evaluation set; only its `question` is read."""
    ngram: Annotated[int, Field(ge=8)] = 13
    """Drop rows that share this many consecutive words with a question of the evaluation set."""
    similarity: Annotated[float, Field(gt=0, le=1)] | None = 0.8
    """Drop rows at least this similar to an evaluation question (Jaccard of word sets, numbers masked); null: check
    only n-grams and equality."""


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """The result of checking training questions against an evaluation set."""

    overlapping: list[bool]
    """For each training question, whether it overlaps."""
    notice: str
    """The number of overlapping rows, as a sentence for the user."""


def find_overlap(questions: Sequence[str], *, evaluation: Sequence[str], config: OverlapConfig) -> Overlap:
    """Check training questions against the questions of an evaluation set."""
    evaluation_set = EvaluationSet(evaluation, config)
    overlapping = [evaluation_set.overlaps(question) for question in questions]
    return Overlap(
        overlapping=overlapping,
        notice=f"{sum(overlapping)} of {len(overlapping)} training rows dropped: they overlap the {len(evaluation)} "
        "questions of task.overlap",
    )


class EvaluationSet:
    """Evaluation questions, indexed to find them in training questions."""

    def __init__(self, questions: Sequence[str], config: OverlapConfig) -> None:
        keys = list(dict.fromkeys(question_key(question) for question in questions))
        self._keys = frozenset(keys)
        self._ngrams = _distinctive_ngrams(keys, config.ngram)
        self._heads = frozenset(" ".join(ngram.split(" ", MIN_WORDS)[:MIN_WORDS]) for ngram in self._ngrams)
        self._lengths = range(MIN_WORDS, config.ngram + 1)
        self._index: NearDuplicateIndex | None = None
        if config.similarity is not None:
            word_sets = list(dict.fromkeys(word_set(question) for question in questions))
            self._index = _index_of(word_sets, threshold=config.similarity)

    def overlaps(self, question: str) -> bool:
        """Whether one of the three rules applies to a training question."""
        key = question_key(question)
        if key in self._keys:
            return True
        if self._contains_ngram(key.split(" ")):
            return True
        return self._index is not None and self._index.has_similar(word_set(question))

    def _contains_ngram(self, words: Sequence[str]) -> bool:
        # Few questions contain the first words of an n-gram, so hardly any needs look-ups at all lengths.
        return any(
            " ".join(words[start : start + length]) in self._ngrams
            for start, head in enumerate(_ngrams(words, MIN_WORDS))
            if head in self._heads
            for length in self._lengths
        )


def repetition_notices(train: Sequence[Example], test: Sequence[Example], *, remedy: str) -> tuple[str, ...]:
    """Notices about questions that training rows repeat, are also test questions, or have several answers."""
    train_keys, test_keys = ([question_key(example.question) for example in side] for side in (train, test))
    notices = []
    if repeated := len(train_keys) - len(frozenset(train_keys)):
        notices.append(f"{repeated} of {len(train)} training rows kept although an earlier row asks the same; {remedy}")
    if shared := sum(map(frozenset(test_keys).__contains__, train_keys)):
        notices.append(
            f"{shared} of {len(train)} training rows kept although test rows ask the same, so that test accuracy may "
            f"come from memory; {remedy}"
        )
    by_key: defaultdict[str, dict[str, str]] = defaultdict(dict)
    for key, example in zip(train_keys + test_keys, (*train, *test), strict=True):
        by_key[key].setdefault(example.gold, example.id)
    if several := [answers for answers in by_key.values() if len(answers) > 1]:
        rows = " and ".join(list(several[0].values())[:2])
        notices.append(f"questions with several gold answers: {len(several)}, the first in rows {rows}; repair them")
    return tuple(notices)


def first_occurrences(questions: Sequence[str], *, threshold: float | None) -> list[bool]:
    """For each question, whether to keep it: no earlier kept question is equal or, with a threshold, this similar."""
    keys: set[str] = set()
    word_sets = [word_set(question) for question in questions] if threshold is not None else []
    index = None if threshold is None else NearDuplicateIndex(_frequencies(word_sets), threshold=threshold)
    keep = []
    for position, question in enumerate(questions):
        key = question_key(question)
        is_first = key not in keys and not (index is not None and index.has_similar(word_sets[position]))
        if is_first:
            keys.add(key)
            if index is not None:
                index.add(word_sets[position])
        keep.append(is_first)
    return keep


def near_any(questions: Sequence[str], references: Sequence[str], *, threshold: float) -> list[bool]:
    """For each question, whether its similarity to any of the references reaches the threshold."""
    index = _index_of([word_set(reference) for reference in references], threshold=threshold)
    return [index.has_similar(word_set(question)) for question in questions]


def cluster_keys(questions: Sequence[str], *, threshold: float | None) -> list[str]:
    """One key per question, shared by all questions that a chain of near duplicates connects.

    The key is the alphabetically first normal form in the cluster, so it does not depend on the order of rows. If the
    threshold is None, only questions with the same normal form share a key.
    """
    keys = [question_key(question) for question in questions]
    if threshold is None:
        return keys
    word_sets = [word_set(question) for question in questions]
    roots = _connected(list(dict.fromkeys(word_sets)), threshold=threshold)
    first: dict[WordSet, str] = {}
    for key, words in zip(keys, word_sets, strict=True):
        root = roots[words]
        first[root] = min(key, first.get(root, key))
    return [first[roots[words]] for words in word_sets]


def is_held_out(key: str, *, fraction: float, seed: int) -> bool:
    """Whether a cluster is on the test side, by a hash of its key: other rows cannot move it to the other side."""
    digest = hashlib.sha256(f"{seed}:{key}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2**64


class NearDuplicateIndex:
    """Word sets, searched by Jaccard similarity without comparing all pairs.

    If the similarity of two sets reaches t, they share one of each set's `n - ceil(t * n) + 1` rarest words, where n is
    its size (prefix filtering: Bayardo et al. 2007, "Scaling up all pairs similarity search"). So only sets that share
    a rare word are compared, and the result is exact.
    """

    def __init__(self, frequencies: Counter[str], *, threshold: float) -> None:
        """`frequencies` rank words by rarity; any counts give exact results, and the data's counts are the fastest."""
        self._frequencies = frequencies
        self._threshold = threshold
        self._sets: set[WordSet] = set()
        self._postings: defaultdict[str, defaultdict[int, list[WordSet]]] = defaultdict(lambda: defaultdict(list))
        """By rare word and size of the set, because sets of very different sizes cannot be similar."""

    def add(self, words: WordSet) -> None:
        """Insert a word set, unless it is already indexed."""
        if words not in self._sets:
            self._sets.add(words)
            for word in self._prefix(words):
                self._postings[word][len(words)].append(words)

    def has_similar(self, words: WordSet) -> bool:
        """Whether the similarity of some indexed set to `words` reaches the threshold."""
        return words in self._sets or next(self.similar(words), None) is not None

    def similar(self, words: WordSet) -> Iterator[WordSet]:
        """The indexed sets whose similarity to `words` reaches the threshold; none for an empty set."""
        size, ratio = len(words), (1 + self._threshold) / self._threshold
        smallest = math.ceil(self._threshold * size - _ROUNDING)
        compared: set[WordSet] = set()
        for position, word in enumerate(self._prefix(words)):
            # Sets that have this word as their rarest common word share at most `size - position` words.
            largest = int((size - position) * ratio - size + _ROUNDING)
            by_size = self._postings.get(word)
            if by_size is None:
                continue
            candidates = {other for n in range(smallest, largest + 1) for other in by_size.get(n, ())} - compared
            compared |= candidates
            for other in candidates:
                common = len(words & other)
                if common / (size + len(other) - common) >= self._threshold:
                    yield other

    def _prefix(self, words: WordSet) -> list[str]:
        length = len(words) - math.ceil(self._threshold * len(words) - _ROUNDING) + 1
        return sorted(words, key=lambda word: (self._frequencies[word], word))[:length]


def question_key(question: str) -> str:
    """The question without case, punctuation and spacing; numbers and arithmetic symbols are kept."""
    return " ".join(_tokens(question))


def word_set(question: str) -> WordSet:
    """The words of the question with every number masked: its wording without its quantities."""
    return frozenset(_NUMBER if _DIGIT.search(token) else token for token in _tokens(question))


def _tokens(question: str) -> list[str]:
    text = unicodedata.normalize("NFKC", question[:_MAX_READ]).casefold()
    tokens: list[str] = _TOKEN.findall(_THOUSANDS.sub("", _HYPHEN.sub(" ", text)))
    return [*tokens, question[_MAX_READ:]] if len(question) > _MAX_READ else tokens


def _index_of(word_sets: Sequence[WordSet], *, threshold: float) -> NearDuplicateIndex:
    index = NearDuplicateIndex(_frequencies(word_sets), threshold=threshold)
    for words in word_sets:
        index.add(words)
    return index


def _frequencies(word_sets: Iterable[WordSet]) -> Counter[str]:
    return Counter(word for words in word_sets for word in words)


def _connected(word_sets: Sequence[WordSet], *, threshold: float) -> dict[WordSet, WordSet]:
    """A representative of each set's connected component, by union-find over all similar pairs of distinct sets."""
    parent = {words: words for words in word_sets}

    def root(node: WordSet) -> WordSet:
        while parent[node] != node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    index = NearDuplicateIndex(_frequencies(word_sets), threshold=threshold)
    for words in word_sets:
        for other in index.similar(words):
            parent[root(other)] = root(words)
        index.add(words)
    return {words: root(words) for words in word_sets}


def _distinctive_ngrams(keys: Sequence[str], ngram: int) -> frozenset[str]:
    """The n-grams that identify an evaluation question: `ngram` words long, or the whole of a shorter question."""
    counts: Counter[str] = Counter()
    for key in keys:
        words = key.split(" ")
        if len(words) >= MIN_WORDS:
            counts.update(set(_ngrams(words, min(ngram, len(words)))))
    return frozenset(text for text, count in counts.items() if count <= MAX_SHARED)


def _ngrams(words: Sequence[str], length: int) -> Iterator[str]:
    return (" ".join(words[start : start + length]) for start in range(len(words) - length + 1))
