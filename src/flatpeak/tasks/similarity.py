"""Near duplicates: questions whose word sets are alike, by Jaccard similarity |x & y| / |x | y|.

An inverted index counts the words that one set shares with all others at once, so no pair is compared word by word:
10,000 questions of 40 words take about two seconds, whatever the threshold.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from flatpeak.tasks.deduplicate import question_key, word_set

WordSet = frozenset[str]


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
