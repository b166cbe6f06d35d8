import random
import time

import pytest

from flatpeak.tasks.decontamination import cluster_keys, is_held_out, near_any, question_key, word_set


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("How many Apples, in all?", "how many apples in all"),
        ("a two-step problem", "a two step problem"),
        ("She has 1,000 coins.", "She has 1000 coins"),
        ("2 + 3 = ?", "2+3="),
        ("“Quoted” words…", '"Quoted" words'),
    ],
)
def test_case_punctuation_and_spacing_do_not_tell_questions_apart(one, other):
    assert question_key(one) == question_key(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("He has 3 cats", "He has 4 cats"),
        ("It costs 1.5", "It costs 15"),
        ("It costs .5", "It costs 5"),
        ("3+4=", "3-4="),
        ("3 * 4", "3 + 4"),
        ("2*(3+4)", "2*3+4"),
        ("What is 5!", "What is 5"),
        ("ratio 3:4", "ratio 3 4"),
        ("x_1", "x1"),
    ],
)
def test_numbers_and_symbols_tell_questions_apart(one, other):
    assert question_key(one) != question_key(other)


def test_word_sets_mask_every_number():
    assert word_set("Tim has 3 cats and 1,250 dogs.") == {"tim", "has", "#", "cats", "and", "dogs"}
    assert word_set("Tim has 17.5 cats and 4 dogs!") == word_set("Tim has 3 cats and 1,250 dogs.")


def jaccard(one, other):
    one, other = word_set(one), word_set(other)
    return len(one & other) / len(one | other) if one | other else 1.0


def questions(*, count, seed):
    generator = random.Random(seed)
    vocabulary = [chr(97 + i // 26) + chr(97 + i % 26) for i in range(60)]
    rows = []
    for _ in range(count):
        if rows and generator.random() < 0.6:
            words = generator.choice(rows).split()
            words[generator.randrange(len(words))] = generator.choice(vocabulary)
        else:
            words = generator.choices(vocabulary, k=generator.randrange(1, 12))
        rows.append(" ".join(words))
    return rows


@pytest.mark.parametrize("threshold", [0.3, 0.5, 0.7, 0.8, 0.9, 1.0])
def test_clusters_are_the_connected_components_of_comparing_every_pair(threshold):
    rows = questions(count=150, seed=1)
    component = list(range(len(rows)))
    for i, one in enumerate(rows):
        for j, other in enumerate(rows[:i]):
            if jaccard(one, other) >= threshold:
                component = [component[i] if c == component[j] else c for c in component]
    keys = cluster_keys(rows, threshold=threshold)
    for i in range(len(rows)):
        for j in range(i):
            assert (keys[i] == keys[j]) == (component[i] == component[j])


@pytest.mark.parametrize("threshold", [0.3, 0.7, 0.8, 1.0])
def test_near_any_agrees_with_comparing_every_pair(threshold):
    train, test = questions(count=120, seed=2), questions(count=80, seed=2)[40:] + questions(count=40, seed=3)
    expected = [any(jaccard(q, r) >= threshold for r in train) for q in test]
    assert near_any(test, train, threshold=threshold) == expected
    assert any(expected)
    assert threshold == 0.3 or not all(expected)


def test_a_similarity_that_equals_the_threshold_reaches_it():
    # 7 common words of 10.
    common = "a b c d e f g"
    assert near_any([f"{common} h"], [f"{common} i j"], threshold=0.7) == [True]
    assert near_any([f"{common} h"], [f"{common} i j"], threshold=0.71) == [False]


def test_questions_without_words_are_alike_and_like_nothing_else():
    assert near_any(["?!", "word"], ["..."], threshold=0.5) == [True, False]
    assert near_any(["?!"], ["word"], threshold=0.5) == [False]
    assert len(set(cluster_keys(["?", "...", "word"], threshold=0.5))) == 2


def test_a_chain_of_near_duplicates_is_one_cluster_named_independently_of_order():
    rows = ["a b c d e", "a b c d f", "a b c g f", "x y z"]
    keys = cluster_keys(rows, threshold=0.6)
    assert keys == ["a b c d e", "a b c d e", "a b c d e", "x y z"]
    assert cluster_keys(rows[::-1], threshold=0.6) == keys[::-1]


def test_without_a_threshold_only_equal_questions_share_a_key():
    assert cluster_keys(["A b?", "a B", "a b 3", "a b 4"], threshold=None) == ["a b", "a b", "a b 3", "a b 4"]


def test_the_held_out_share_is_the_fraction_and_the_seed_chooses_it():
    keys = [f"question {i}" for i in range(4000)]
    sides = {seed: [is_held_out(key, fraction=0.2, seed=seed) for key in keys] for seed in (0, 1)}
    # The standard deviation of a share is 0.006.
    assert all(abs(sum(side) / 4000 - 0.2) < 0.025 for side in sides.values())
    assert sides[0] != sides[1]
    # A larger fraction only adds to the test side.
    assert all(is_held_out(key, fraction=0.4, seed=0) for key, out in zip(keys, sides[0], strict=True) if out)


def test_a_question_of_many_megabytes_is_compared_within_seconds():
    long = "How many kites, of 12? " * 2_000_000
    start = time.perf_counter()
    assert question_key(long) == question_key(long.replace("How", "how", 1)) != question_key(long + "!")
    assert word_set(long) >= {"how", "many", "kites", "of", "#"}
    assert time.perf_counter() - start < 10  # half a minute without a bound
