from __future__ import annotations

import itertools

import pytest

from flatpeak.errors import UserError
from flatpeak.rewards.judge.rubrics import (
    Criterion,
    Gate,
    NoVerdictError,
    PairwiseFormat,
    Rubric,
    RubricFormat,
    built_in_rubrics,
    load_rubric,
)


def test_the_built_in_rubrics_load_and_their_best_reply_is_worth_one():
    assert built_in_rubrics() == ["correctness", "helpfulness", "three_levels", "weighted", "weighted_gated"]
    for name, output in itertools.product(built_in_rubrics(), ("json_schema", "json")):
        form = RubricFormat(rubric=load_rubric(name), output=output)
        assert form.rubric.name == name
        assert form.parse(form.best_reply) == 1.0


def test_the_weighted_rubric_is_half_accuracy_a_third_concision_and_the_rest_format():
    rubric = load_rubric("weighted")
    assert {name: c.weight for name, c in rubric.criteria.items()} == {
        "accuracy": 0.5,
        "concision": 0.35,
        "format": 0.15,
    }
    assert rubric.score({"accuracy": 10, "concision": 0, "format": 0}) == pytest.approx(0.5)
    assert rubric.score({"accuracy": 4, "concision": 10, "format": 8}) == pytest.approx(0.2 + 0.35 + 0.12)


def test_style_counts_only_behind_the_gate():
    rubric = load_rubric("weighted_gated")
    assert rubric.score({"accuracy": 4, "concision": 10, "format": 10}) == pytest.approx(0.2)
    assert rubric.score({"accuracy": 5, "concision": 10, "format": 10}) == pytest.approx(0.75)


def test_the_finer_rubric_can_tell_apart_what_the_coarse_one_cannot():
    fine, coarse = load_rubric("weighted"), load_rubric("three_levels")
    assert (
        len(
            {
                round(fine.score(dict(zip(fine.criteria, m, strict=True))), 9)
                for m in itertools.product(range(11), repeat=3)
            }
        )
        > 100
    )
    assert [coarse.score({"quality": mark}) for mark in (0, 0.5, 1)] == [0.0, 0.5, 1.0]


def test_marks_are_normalized_by_their_scale_and_weights_by_their_sum():
    rubric = Rubric(
        name="r",
        criteria={"a": Criterion(question="", weight=3, range=(-1, 1)), "b": Criterion(question="", levels=(2, 6))},
    )
    assert rubric.score({"a": 0, "b": 6}) == pytest.approx((3 * 0.5 + 1) / 4)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("name: r\ncriteria: {}\n", "criteria"),
        ("name: r\ncriteria: {a: {question: q}}\n", "either levels"),
        ("name: r\ncriteria: {a: {question: q, levels: [1, 0]}}\n", "ascending"),
        ("name: r\ncriteria: {a: {question: q, levels: [1]}}\n", "at least two"),
        ("name: r\ncriteria: {a: {question: q, range: [0, 1], levels: [0, 1]}}\n", "either levels"),
        ("name: r\ncriteria: {a: {question: q, range: [0, 1], weight: 0}}\n", "weight"),
        ("name: r\ncriteria: {a: {question: q, range: [0, 1], wieght: 1}}\n", "wieght"),
        ("name: r\ncriteria: {rationale: {question: q, range: [0, 1]}}\n", "rationale"),
        ("name: r\ncriteria: {a: {question: q, range: [0, 1]}}\ngate: {criterion: b}\n", "choose one of a"),
        ("name: [", "no YAML"),
    ],
)
def test_a_bad_rubric_is_refused_with_its_place(tmp_path, content, named):
    path = tmp_path / "mine.yaml"
    path.write_text(content)
    with pytest.raises(UserError, match=r"mine\.yaml") as error:
        load_rubric(str(path))
    assert named in str(error.value)
    assert "\n" not in str(error.value)


def test_an_unknown_rubric_names_the_known_ones_and_a_missing_file_itself():
    with pytest.raises(UserError, match="correctness, helpfulness, three_levels"):
        load_rubric("corectness")
    with pytest.raises(UserError, match=r"nowhere\.yaml"):
        load_rubric("nowhere.yaml")


def test_the_schema_asks_for_the_rationale_first_and_bounds_every_mark():
    rubric = Rubric(
        name="r", criteria={"a": Criterion(question="", range=(0, 10)), "b": Criterion(question="", levels=(0, 1))}
    )
    assert RubricFormat(rubric=rubric, output="json_schema").schema == {
        "type": "object",
        "properties": {
            "rationale": {"type": "string"},
            "a": {"type": "number", "minimum": 0.0, "maximum": 10.0},
            "b": {"type": "number", "enum": [0.0, 1.0]},
        },
        "required": ["rationale", "a", "b"],
        "additionalProperties": False,
    }
    assert RubricFormat(rubric=rubric, output="json").schema is None


@pytest.mark.parametrize("mark", ["10.1", "-0.1", "1e9", "11"])
def test_a_mark_out_of_its_range_is_no_mark_and_is_never_clipped(mark):
    rubric = Rubric(name="r", criteria={"a": Criterion(question="", range=(0, 10))})
    with pytest.raises(NoVerdictError):
        RubricFormat(rubric=rubric, output="json").parse(f'{{"a": {mark}}}')


def test_a_mark_between_the_levels_is_no_mark():
    form = RubricFormat(rubric=load_rubric("three_levels"), output="json")
    assert form.parse('{"quality": 0.5}') == 0.5
    with pytest.raises(NoVerdictError, match=r"0\.7, but has to be one of 0, 0\.5, 1"):
        form.parse('{"quality": 0.7}')


def test_a_comparison_is_read_from_the_first_answers_side():
    form = PairwiseFormat(rubric=load_rubric("correctness"), output="json_schema")
    assert [form.parse(f'{{"better": "{choice}"}}') for choice in ("A", "tie", "B", "b")] == [1.0, 0.5, 0.0, 0.0]
    for bad in ('{"better": "C"}', '{"better": 1}', '{"winner": "A"}'):
        with pytest.raises(NoVerdictError):
            form.parse(bad)


def test_a_gate_above_the_scale_is_refused():
    with pytest.raises(ValueError, match="less than or equal to 1"):
        Gate(criterion="a", at_least=5)
