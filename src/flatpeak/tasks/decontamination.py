"""Whether a training question asks what an evaluation set asks, and near duplicates among very many questions.

A training question overlaps an evaluation set if one of these holds, after case, punctuation and spacing are set aside:

1. it equals an evaluation question;
2. it contains `ngram` consecutive words (13) of one, or the whole of one that has fewer, but at least 8 (Brown et al.
   2020, arXiv 2005.14165, appendix C). A run of words that more than 10 evaluation questions share is wording, such as
   "which of the following statements is true about the", and is passed over;
3. its word set, numbers masked, has a Jaccard similarity of at least `similarity` (0.8) to that of one.

The third rule is found without comparing all pairs. Two sets whose similarity reaches t share one of the
`n - ceil(t * n) + 1` rarest words of each, n its size (prefix filtering: Bayardo et al. 2007, "Scaling up all pairs
similarity search"), so only sets that share a rare word are compared, and the result is exact.
"""

from __future__ import annotations

import hashlib
import math
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from flatpeak.tasks.config import OverlapConfig

# A number keeps its inner signs (1.5, 3:4) and a final "!", so that 5! and 5 stay apart; a symbol such as + or ( is
# a token of its own; what the last alternative leaves out is punctuation.
_TOKEN = re.compile(r"\.?\d+(?:[.,:/]\d+)*!?|[^\W\d_]+|[^\w\s.,;:!?'\"`’‘“”…]|_")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_HYPHEN = re.compile(r"(?<=[^\W\d_])-(?=[^\W\d_])")
_DIGIT = re.compile(r"\d")
NUMBER = "#"


def question_key(question: str) -> str:
    """The question without case, punctuation and spacing; numbers and symbols of arithmetic are kept."""
    return " ".join(_tokens(question))


def word_set(question: str) -> frozenset[str]:
    """The words of the question, every number masked: what its wording is made of, whatever it counts."""
    return frozenset(NUMBER if _DIGIT.search(token) else token for token in _tokens(question))


def _tokens(question: str) -> list[str]:
    text = unicodedata.normalize("NFKC", question).casefold()
    return _TOKEN.findall(_THOUSANDS.sub("", _HYPHEN.sub(" ", text)))


WordSet = frozenset[str]

SHORTEST: Final = 8
"""Shorter evaluation questions overlap only with their equals."""
WORDING: Final = 10
"""Runs of words in more evaluation questions than this are no sign of any of them."""
_ROUNDING: Final = 1e-9


class RareWordIndex:
    """Word sets that grow in number, searched by similarity."""

    def __init__(self, frequencies: Counter[str], *, threshold: float) -> None:
        """`frequencies` say which words are rare; any counts give right answers, good ones give them fast."""
        self._frequencies = frequencies
        self._threshold = threshold
        self._sets: set[WordSet] = set()
        self._holders: defaultdict[str, defaultdict[int, list[WordSet]]] = defaultdict(lambda: defaultdict(list))
        """By a rare word and the size of the set: sets of very different sizes cannot be similar."""

    def add(self, words: WordSet) -> None:
        """Make a set findable."""
        if words not in self._sets:
            self._sets.add(words)
            for word in self._prefix(words):
                self._holders[word][len(words)].append(words)

    def has_similar(self, words: WordSet) -> bool:
        """Whether the similarity of some set added so far to `words` reaches the threshold."""
        if words in self._sets:
            return True
        size = len(words)
        sizes = range(math.ceil(self._threshold * size - _ROUNDING), int(size / self._threshold + _ROUNDING) + 1)
        tried: set[int] = set()
        for word in self._prefix(words):
            by_size = self._holders.get(word)
            if by_size is None:
                continue
            for other_size in sizes:
                for other in by_size.get(other_size, ()):
                    if id(other) in tried:
                        continue
                    tried.add(id(other))
                    common = len(words & other)
                    if common / (size + other_size - common) >= self._threshold:
                        return True
        return False

    def _prefix(self, words: WordSet) -> list[str]:
        length = len(words) - math.ceil(self._threshold * len(words) - _ROUNDING) + 1
        return sorted(words, key=lambda word: (self._frequencies[word], word))[:length]


def first_of_near(questions: Sequence[str], *, threshold: float | None) -> list[bool]:
    """For each question, whether to keep it: no kept question before it is equal or, with a threshold, that similar."""
    keys: set[str] = set()
    sets = [word_set(question) for question in questions] if threshold is not None else []
    index = RareWordIndex(_frequencies(sets), threshold=threshold) if threshold is not None else None
    keep = []
    for place, question in enumerate(questions):
        key = question_key(question)
        fresh = key not in keys and not (index is not None and index.has_similar(sets[place]))
        if fresh:
            keys.add(key)
            if index is not None:
                index.add(sets[place])
        keep.append(fresh)
    return keep


class EvaluationSet:
    """Evaluation questions, prepared to be found in training questions."""

    def __init__(self, questions: Sequence[str], config: OverlapConfig) -> None:
        keys = list(dict.fromkeys(question_key(question) for question in questions))
        self._keys = frozenset(keys)
        self._runs = _telling_runs(keys, config.ngram)
        self._heads = frozenset(" ".join(run.split(" ", SHORTEST)[:SHORTEST]) for run in self._runs)
        self._lengths = range(SHORTEST, config.ngram + 1)
        self._index: RareWordIndex | None = None
        if config.similarity is not None:
            sets = list(dict.fromkeys(word_set(question) for question in questions))
            self._index = RareWordIndex(_frequencies(sets), threshold=config.similarity)
            for words in sets:
                self._index.add(words)

    def overlaps(self, question: str) -> bool:
        """Whether one of the rules holds of a training question."""
        key = question_key(question)
        if key in self._keys:
            return True
        if self._contains_run(key.split(" ")):
            return True
        return self._index is not None and self._index.has_similar(word_set(question))

    def _contains_run(self, words: Sequence[str]) -> bool:
        # Few questions contain the first words of a run, so hardly any is looked up at all its lengths.
        return any(
            " ".join(words[start : start + length]) in self._runs
            for start, head in enumerate(_runs(words, SHORTEST))
            if head in self._heads
            for length in self._lengths
        )


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """What a check of training questions found."""

    found: list[bool]
    """For each training question, whether it overlaps."""
    notice: str
    """The count in words."""


def find_overlap(questions: Sequence[str], *, evaluation: Sequence[str], config: OverlapConfig) -> Overlap:
    """Check training questions against the questions of an evaluation set."""
    known = EvaluationSet(evaluation, config)
    found = [known.overlaps(question) for question in questions]
    return Overlap(
        found=found,
        notice=f"{sum(found)} of {len(found)} training rows dropped: they overlap the {len(evaluation)} questions of "
        "task.overlap",
    )


def _telling_runs(keys: Sequence[str], ngram: int) -> frozenset[str]:
    """The runs of words that give an evaluation question away: `ngram` long, or the whole of a shorter question."""
    counts: Counter[str] = Counter()
    for key in keys:
        words = key.split(" ")
        if len(words) >= SHORTEST:
            counts.update(set(_runs(words, min(ngram, len(words)))))
    return frozenset(run for run, count in counts.items() if count <= WORDING)


def _runs(words: Sequence[str], length: int) -> Iterator[str]:
    return (" ".join(words[start : start + length]) for start in range(len(words) - length + 1))


def _frequencies(sets: Iterable[WordSet]) -> Counter[str]:
    return Counter(word for words in sets for word in words)


class SimilarityIndex:
    """Word sets, looked up by similarity."""

    def __init__(self, word_sets: Sequence[WordSet], *, threshold: float) -> None:
        self._threshold = threshold
        self._sizes = np.array([len(words) for words in word_sets], dtype=np.int64)
        holders: dict[str, list[int]] = defaultdict(list)
        for index, words in enumerate(word_sets):
            for word in words:
                holders[word].append(index)
        self._holders = {word: np.array(indices, dtype=np.int64) for word, indices in holders.items()}

    def similar(self, words: WordSet) -> NDArray[np.int64]:
        """The places of all indexed sets whose similarity to `words` reaches the threshold, in order."""
        shared = [self._holders[word] for word in words if word in self._holders]
        if not shared:
            return np.empty(0, dtype=np.int64)
        common = np.bincount(np.concatenate(shared), minlength=len(self._sizes))
        return np.flatnonzero(common / (len(words) + self._sizes - common) >= self._threshold)


def cluster_keys(questions: Sequence[str], *, threshold: float | None) -> list[str]:
    """One key per question, shared by all questions that a chain of near duplicates connects.

    The key is the alphabetically first normal form in the cluster, so it does not depend on the order of the rows.
    With threshold None only questions of the same normal form share one.
    """
    keys = [question_key(question) for question in questions]
    if threshold is None:
        return keys
    words = [word_set(question) for question in questions]
    distinct = list(dict.fromkeys(words))
    roots = dict(zip(distinct, _connected(distinct, threshold=threshold), strict=True))
    first: dict[int, str] = {}
    for key, word in zip(keys, words, strict=True):
        root = roots[word]
        first[root] = min(key, first.get(root, key))
    return [first[roots[word]] for word in words]


def near_any(questions: Sequence[str], references: Sequence[str], *, threshold: float) -> list[bool]:
    """For each question, whether its similarity to any of the references reaches the threshold."""
    known = list(dict.fromkeys(word_set(reference) for reference in references))
    exact = set(known)
    index = SimilarityIndex(known, threshold=threshold)
    return [words in exact or index.similar(words).size > 0 for words in map(word_set, questions)]


def held_out(key: str, *, fraction: float, seed: int) -> bool:
    """Whether a cluster belongs to the test side: a hash of its key, so other rows never move it across."""
    digest = hashlib.sha256(f"{seed}:{key}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2**64


def _connected(word_sets: Sequence[WordSet], *, threshold: float) -> list[int]:
    """Union-find over all similar pairs; the root of each set."""
    parent = list(range(len(word_sets)))

    def root(node: int) -> int:
        while parent[node] != node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    index = SimilarityIndex(word_sets, threshold=threshold)
    for this, words in enumerate(word_sets):
        for other in index.similar(words).tolist():
            parent[root(other)] = root(this)
    return [root(node) for node in range(len(word_sets))]
