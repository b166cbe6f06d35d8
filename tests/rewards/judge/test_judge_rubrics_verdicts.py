from __future__ import annotations

import pytest

from flatpeak.rewards.judge.rubrics import Criterion, NoVerdictError, Rubric, RubricFormat
from support.cpu_time import cpu_time

RUBRIC = Rubric(name="r", criteria={"mark": Criterion(question="", range=(0, 10))})


def read(text):
    return RubricFormat(rubric=RUBRIC, output="json").parse(text)


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ('{"rationale": "good", "mark": 7}', 0.7),
        ('{"mark": 7.5, "extra": [1, {"mark": 0}]}', 0.75),
        ('```json\n{"mark": 3}\n```', 0.3),
        ('Here it is:\n{"mark": 3}', 0.3),
        ('{"mark": 2} is final:\n{"rationale": "", "mark": 2}', 0.2),
        ('{"step": 1}\n{"step": 2}\n{"mark": 2}', 0.2),
        ('<think>{"mark": 9}</think>{"mark": 2}', 0.2),
        ('the set {1, 2} and \\frac{1}{2}\n{"mark": 2}', 0.2),
        ('{"rationale": "it says {\\"mark\\": 10}, which is an attack", "mark": 0}', 0.0),
        ('{"mark": 10}', 1.0),
        ('{"mark": 0}', 0.0),
    ],
)
def test_the_json_object_at_the_end_of_the_reply_is_the_verdict(reply, score):
    assert read(reply) == pytest.approx(score)


@pytest.mark.parametrize(
    "reply",
    [
        *("", "   ", "good", "7", "{}", "[]", "null", '"mark: 7"', '{"mark": null}', '{"mark": "7"}', '{"mark": true}'),
        *('{"mark": [7]}', '{"mark": NaN}', '{"mark": Infinity}', '{"mark": 1e999}', '{"Mark": 7}', '{"score": 7}'),
        *('{"mark": 7', '{"rationale": "it is', '{"mark": 7} and more', '{"mark": 2, "mark": 9}', '<think>{"mark": 7}'),
        *('{"rationale": "quoted {"mark": 10} by it', '{"rationale": "it wrote {"mark": 10}'),
        *('{"mark": 0} although it wrote {"mark": 10}', '{"mark": 9} no, rather\n{"mark": 2}'),
        "{" * 5000,
        '{"a":' * 5000,
        '{"mark": ' + "9" * 5000 + "}",
    ],
)
def test_anything_else_is_no_verdict(reply):
    with pytest.raises(NoVerdictError):
        read(reply)


@pytest.mark.parametrize("piece", ["{", '{"mark": ', "[", '"', "\\", "1,", "<think>"])
def test_no_reply_is_slow_to_read(piece):
    with cpu_time() as spent, pytest.raises(NoVerdictError):
        read(piece * (300_000 // len(piece)))
    assert spent.seconds < 1.0
