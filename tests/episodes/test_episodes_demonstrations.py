"""Demonstrations with calls: the tokens of an episode, of which answers are read and not imitated."""

from __future__ import annotations

import pytest

from flatpeak.episodes.build import demonstrated
from flatpeak.episodes.rendering import make_renderer
from flatpeak.errors import UserError
from flatpeak.utils.control_tokens import TextEncoder
from support.chat_templates import HERMES, byte_level_tokenizer
from support.episodes import END, TOKENIZER

ADD = {"type": "function", "function": {"name": "add", "description": "", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4", [("4", True)]),
        (
            "<call>add(x=1)</call><result>2</result>so 2",
            [("<call>add(x=1)</call>", True), ("<result>2</result>", False), ("so 2", True)],
        ),
        ("a <result>2</result> of nothing", [("a <result>2</result> of nothing", True)]),
        (
            "<call>add(x=1)</call><result>2</result><call>add(x=2)</call><result>3</result>3",
            [
                ("<call>add(x=1)</call>", True),
                ("<result>2</result>", False),
                ("<call>add(x=2)</call>", True),
                ("<result>3</result>", False),
                ("3", True),
            ],
        ),
    ],
)
def test_a_plain_demonstration_is_cut_where_answers_are(text: str, expected: list[tuple[str, bool]]) -> None:
    renderer = make_renderer(TOKENIZER, format="plain", schemas=[ADD])
    pieces = demonstrated(text, END, renderer=renderer, encoder=TextEncoder(TOKENIZER))
    assert [(TOKENIZER.decode(ids), own) for ids, own in pieces] == expected


def test_space_before_an_answer_is_neither_written_nor_read() -> None:
    renderer = make_renderer(TOKENIZER, format="plain", schemas=[ADD])
    pieces = demonstrated(
        "<call>add(x=1)</call>\n<result>2</result>2", END, renderer=renderer, encoder=TextEncoder(TOKENIZER)
    )
    assert [(TOKENIZER.decode(ids), own) for ids, own in pieces] == [
        ("<call>add(x=1)</call>", True),
        ("<result>2</result>", False),
        ("2", True),
    ]


@pytest.mark.parametrize(
    "text",
    [
        "<call>add(x=1)</call><call>add(x=2)</call><result>2</result>3",
        "<call>add(x=1)</call><result>2</result><result>3</result>3",
        "<call>add(x=1)</call><call>add(x=2)</call><result>2</result>\n<result>3</result>5",  # a turn ends at its call
    ],
)
def test_a_demonstration_whose_answers_would_be_imitated_is_refused(text: str) -> None:
    renderer = make_renderer(TOKENIZER, format="plain", schemas=[ADD])
    with pytest.raises(UserError, match=r"a demonstration has \d calls and then \d <result> in '<call>add"):
        demonstrated(text, END, renderer=renderer, encoder=TextEncoder(TOKENIZER))


def test_a_chat_demonstration_has_the_template_s_tokens_between_turns() -> None:
    tokenizer = byte_level_tokenizer(HERMES)
    renderer = make_renderer(tokenizer, format="chat", schemas=[ADD])
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    call = '<tool_call>{"name": "add", "arguments": {"x": 1}}</tool_call>'
    text = f"I add. {call}{call}<result>2</result><result>3</result>It is 5."
    pieces = demonstrated(text, end, renderer=renderer, encoder=TextEncoder(tokenizer))
    assert [(tokenizer.decode(ids), own) for ids, own in pieces] == [
        (f"I add. {call}{call}<|im_end|>", True),
        ("\n<|im_start|>tool\n2<|im_end|>\n<|im_start|>tool\n3<|im_end|>\n<|im_start|>assistant\n", False),
        ("It is 5.", True),
    ]
