"""The forms in which chat templates write calls, other than JSON, which test_episodes_rendering.py has."""

import keyword
import re
import string
import time
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatpeak.episodes.calls import json_calls
from flatpeak.episodes.rendering import make_renderer
from flatpeak.errors import UserError
from support.chat_templates import CHATML, HERMES, Chat, byte_level_tokenizer, trl_templates, trl_tokenizer
from support.properties import repeatable

JSON_CALL = '<tool_call>{"name": "f", "arguments": {"s": "a"}}</tool_call>'
TYPES = {
    "s": {"type": "string"},
    "n": {"type": "integer"},
    "r": {"type": "number"},
    "b": {"type": "boolean"},
    "l": {"type": "array"},
    "d": {"type": "object"},
    "m": {"type": "string", "nullable": True},
    "k": {"type": "integer", "nullable": True},
}


def tool(name, types):
    return {
        "type": "function",
        "function": {"name": name, "description": "", "parameters": {"type": "object", "properties": types}},
    }


ARGUMENTS = "{% for k, v in c.function.arguments.items() %}"
WRITTEN = "{{ v if v is string else v | tojson }}"
JSON_WRITTEN = (
    '<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</tool_call>'
)
FORMS = {
    "function": "<tool_call>\n<function={{ c.function.name }}>\n"
    + ARGUMENTS
    + "<parameter={{ k }}>\n"
    + WRITTEN
    + "\n</parameter>\n{% endfor %}</function>\n</tool_call>",
    "key": "<tool_call>{{ c.function.name }}\n"
    + ARGUMENTS
    + "<arg_key>{{ k }}</arg_key>\n<arg_value>"
    + WRITTEN
    + "</arg_value>\n{% endfor %}</tool_call>",
    "list": "<|tool_call_start|>[{{ c.function.name }}("
    + ARGUMENTS
    + "{{ ', ' if not loop.first }}{{ k }}={{ v | tojson }}{% endfor %})]<|tool_call_end|>",
}


@cache
def renderer_of(form):
    assert JSON_WRITTEN in HERMES.template
    tokenizer = byte_level_tokenizer(Chat(HERMES.template.replace(JSON_WRITTEN, FORMS[form]), CHATML))
    return tokenizer, make_renderer(tokenizer, format="chat", schemas=[tool("f", TYPES)])


def calls_in(form, text):
    tokenizer, renderer = renderer_of(form)
    return renderer.calls(tokenizer.encode(text, add_special_tokens=False))


def read(form, text):
    calls = calls_in(form, text)
    assert [call.error for call in calls if call.error] == []
    return [(call.name, dict(call.arguments)) for call in calls]


def function_call(name="f", **texts):
    arguments = "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in texts.items())
    return f"<tool_call>\n<function={name}>\n{arguments}</function>\n</tool_call>"


def key_call(name="f", **texts):
    arguments = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{text}</arg_value>\n" for key, text in texts.items())
    return f"<tool_call>{name}\n{arguments}</tool_call>"


TAGGED = {"function": function_call, "key": key_call}
CALLS = {**TAGGED, "list": lambda: "<|tool_call_start|>[f()]<|tool_call_end|>"}


@pytest.mark.parametrize("form", TAGGED)
@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            " ",
            "a",
            "two\nlines",
            "\n\nlines before",
            "lines after\n\n",
            "\n",
            "12",
            "true",
            "null",
            "'a'",
            '{"a": 1}',
        ),
        *("</parameter>", "</parameter>\n", "</function>", "</function>\n</tool_call>", "<parameter=n>\n1"),
        *("</arg_value>", "</arg_value>\n", "</tool_call>", "<arg_key>n</arg_key>\n<arg_value>1"),
        *("<tool_call>", "<think>", "</think>", "<think></think>", function_call(n="1"), key_call(n="1"), JSON_CALL),
    ],
)
def test_a_parameter_that_the_schema_calls_a_string_is_the_text_between_its_tags(form, text):
    if text == TAGGED[form](n="1"):
        return  # The form cannot carry itself.
    call = TAGGED[form](s=text, n="7")
    assert read(form, call) == [("f", {"s": text, "n": 7})]
    assert read(form, f"So: {call}\n{call}<|im_end|>") == [("f", {"s": text, "n": 7})] * 2


@pytest.mark.parametrize("form", TAGGED)
@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("n", "-3", -3),
        ("n", "3.0", 3.0),
        ("n", "three", "three"),
        ("n", "9" * 5000, "9" * 5000),
        ("n", "(" * 10_000, "(" * 10_000),
        ("n", "__import__('os').getpid()", "__import__('os').getpid()"),
        ("n", "2**9", "2**9"),
        ("r", "1e-3", 0.001),
        ("b", "true", True),
        ("b", "True", True),
        ("b", "yes", "yes"),
        ("l", "[1, null]", [1, None]),
        ("l", "\n[1, None]\n", [1, None]),
        ("l", r"['\d']", [r"\d"]),
        ("d", '{\n"a": {"b": true}}', {"a": {"b": True}}),
        ("d", "{'a': False}", {"a": False}),
        ("k", "null", None),
        ("k", "None", None),
        ("m", "null", None),
        ("m", "None", None),
        ("m", "none", "none"),
        ("m", "12", "12"),
        ("s", "null", "null"),
        ("unknown", "[1]", [1]),
        ("unknown", "a b", "a b"),
    ],
)
def test_another_parameter_is_json_or_a_literal_or_else_text(form, key, text, value):
    ((_, arguments),) = read(form, TAGGED[form](**{key: text}))
    assert repr(arguments) == repr({key: value})


@pytest.mark.parametrize("form", TAGGED)
def test_arguments_of_an_unknown_tool_are_read_as_json(form):
    assert read(form, TAGGED[form]("g", s="1")) == [("g", {"s": 1})]


@pytest.mark.parametrize(
    ("form", "text", "arguments"),
    [
        ("function", "<tool_call><function=f></function></tool_call>", {}),
        ("function", "<tool_call><function=f><parameter=s>a</parameter></function></tool_call>", {"s": "a"}),
        ("function", "<tool_call>\n\n<function=f> <parameter=n>1</parameter> </function>\n\n</tool_call>", {"n": 1}),
        ("key", "<tool_call>f</tool_call>", {}),
        ("key", "<tool_call>f<arg_key>s</arg_key><arg_value>a</arg_value></tool_call>", {"s": "a"}),
        ("key", "<tool_call>\nf\n<arg_key> n </arg_key>\n\n<arg_value>1</arg_value>\n</tool_call>", {"n": 1}),
        ("list", "<|tool_call_start|>[f()]<|tool_call_end|>", {}),
        ("list", "<|tool_call_start|>f(s='a')<|tool_call_end|>", {"s": "a"}),
        ("list", '<|tool_call_start|>\n[f(d={"a": [true, False, null]}, n=-1)]<|tool_call_end|>', None),
    ],
)
def test_spaces_between_tags_do_not_matter(form, text, arguments):
    expected = {"d": {"a": [True, False, None]}, "n": -1} if arguments is None else arguments
    assert read(form, text) == [("f", expected)]


def test_a_list_has_several_calls():
    text = "<|tool_call_start|>[f(n=1), g(x='a\\n')]<|tool_call_end|> and <|tool_call_start|>[f()]<|tool_call_end|>"
    assert read("list", text) == [("f", {"n": 1}), ("g", {"x": "a\n"}), ("f", {})]


def test_a_turn_of_many_spaces_is_read_at_once():
    turn = "{" + " " * 50_000 + "}"
    start = time.process_time()
    assert json_calls(turn, turn, ()) == ()
    assert time.process_time() - start < 2  # a search from every space takes ten seconds


@pytest.mark.parametrize("form", FORMS)
def test_calls_in_the_reasoning_are_not_read(form):
    call = CALLS[form]()
    assert read(form, f"<think>{call}") == []
    assert read(form, f"<think>\n{call}\n</think>\n\n{call}") == [("f", {})]
    assert read(form, "no call </tool_call> </function> <function=f>") == []


@pytest.mark.parametrize("form", TAGGED)
def test_every_beginning_of_a_call_is_one_that_does_not_end(form):
    whole = TAGGED[form](s="two\nlines", n="7")
    for size in range(len("<tool_call>"), len(whole)):
        (call,) = calls_in(form, f"So: {whole[:size]}<|im_end|>")
        assert call.error.startswith("The call does not end. Write a call as\n<tool_call>")
        assert (call.name, call.arguments) == ("", {})


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("function", '{"name": "f", "arguments": {}}'),
        ("function", "<function=f>"),
        ("function", "<function=f>\n<parameter=n>\n1\n</function>"),
        ("function", "<function=f>\n<parameter>\n1\n</parameter>\n</function>"),
        ("function", "<function=f>\n<parameter=n>\nNaN\n</parameter>\n</function>"),
        ("function", "<function=f>\n<parameter=n>\n{1}\n</parameter>\n</function>"),
        ("function", "f()"),
        ("key", '{"name": "f", "arguments": {}}'),
        ("key", '{"name":"f","arguments":{}}'),
        ("key", ""),
        ("key", "f\n<arg_key>n</arg_key>\n<arg_key>n</arg_key>"),
        ("key", "f\n<arg_value>n</arg_value>"),
        ("key", "f\n<arg_key>n</arg_key>\n<arg_value>1e999</arg_value>"),
        ("key", "f\n<arg_key>n</arg_key>\n<arg_value>b'1'</arg_value>"),
        ("key", "f (n=1)"),
    ],
)
def test_a_malformed_call_between_tags_is_told_the_form_and_the_next_one_is_read(form, text):
    calls = calls_in(form, f"<tool_call>{text}</tool_call>\n{TAGGED[form](n='1')}<|im_end|>")
    assert [dict(call.arguments) for call in calls] == [{}, {"n": 1}]
    example = calls[0].error.removeprefix("The call could not be read. Write a call as\n")
    assert read(form, example) == [("name", {"x": 1})]
    assert calls[1].error is None


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[f(1)]<|tool_call_end|>", "Give each argument once, by its name."),
        ("[f(n=1, n=1)]<|tool_call_end|>", "Give each argument once, by its name."),
        ("[1]<|tool_call_end|>", "This is not a call."),
        ("[os.f()]<|tool_call_end|>", "This is not a call."),
        ("[f(n=print())]<|tool_call_end|>", "The call could not be read."),
        ("[f(n=nil)]<|tool_call_end|>", "The call could not be read."),
        ("[f(s='a\nb')]<|tool_call_end|>", "The call could not be read."),
        ("[f(n=1)<|tool_call_end|>", "The call could not be read."),
        ('{"name": "f", "arguments": {}}<|tool_call_end|>', "This is not a call."),
        ("[" * 10_000 + "<|tool_call_end|>", "The call could not be read."),
        (f"[f(n={'[' * 101}{']' * 101})]<|tool_call_end|>", "The call could not be read."),
        ("[f(n=1)]<|im_end|>", "The call does not end."),
    ],
)
def test_a_malformed_list_of_calls_is_told_the_form(text, problem):
    (call,) = calls_in("list", f"<|tool_call_start|>{text}")
    form = 'Write calls as <|tool_call_start|>[name(x=1, y="a")]<|tool_call_end|>: arguments by name.'
    assert call.error == f"{problem} {form}"


@pytest.mark.parametrize("form", FORMS)
def test_the_template_s_form_is_the_one_that_is_read(form):
    others = [CALLS[other]() for other in FORMS if other != form]
    for text in [JSON_CALL, *others]:
        assert [call for call in calls_in(form, text) if not call.error] == []


@pytest.mark.parametrize("form", FORMS)
def test_a_template_that_describes_no_tools_must_write_json_as_the_system_message_asks(form):
    template = HERMES.template.replace(JSON_WRITTEN, FORMS[form]).replace("{{ tools | tojson }}", "")
    template = template.replace("{% if tools %}", "{% if false %}")
    with pytest.raises(UserError, match="it writes calls in a form that is not read"):
        make_renderer(byte_level_tokenizer(Chat(template, CHATML)), format="chat", schemas=[tool("f", TYPES)])


PIECES = st.sampled_from(
    [
        *(
            "a",
            "é",
            "数",
            "🙂",
            " ",
            "\n",
            "\t",
            "\r",
            "\\",
            "'",
            '"',
            "{",
            "[",
            "1",
            "null",
            "True",
            "{{ x }}",
            "<",
            ">",
        ),
        *("</parameter>", "<parameter=x>", "</function>", "</arg_value>", "<arg_key>", "</tool_call>", "<tool_call>"),
        *("<think>", "</think>", "<|im_end|>"),
    ]
)
ENDS = re.compile(
    r"</parameter>\s*(<parameter=|</function>)|</arg_value>\s*(<arg_key>|</tool_call>)|</tool_call>\s*<tool_call>"
)
"""What no value of the forms with tags can contain: the end of a value or call, and what follows it."""
TEXTS = st.lists(PIECES, max_size=8).map("".join).filter(lambda text: not ENDS.search(text))
NUMBERS = st.integers(-(10**20), 10**20), st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.one_of(TEXTS, *NUMBERS, st.booleans(), st.none()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
VALUES = {
    "string": TEXTS,
    "integer": NUMBERS[0],
    "number": NUMBERS[1],
    "boolean": st.booleans(),
    "array": st.lists(JSON, max_size=3),
    "object": st.dictionaries(TEXTS, JSON, max_size=3),
}
NAMES = st.text(string.ascii_letters, min_size=1, max_size=12).filter(
    lambda name: not keyword.iskeyword(name) and name not in {"null", "true", "false"}
)


@st.composite
def typed_calls(draw):
    """A tool's name, the types of its parameters, and the arguments of one to three calls."""
    types = draw(st.dictionaries(NAMES, st.tuples(st.sampled_from(sorted(VALUES)), st.booleans()), max_size=4))
    values = {
        # A text that may be None cannot be "null" or "None".
        key: VALUES[kind].filter(lambda value: value not in ("null", "None")) | st.none() if nullable else VALUES[kind]
        for key, (kind, nullable) in types.items()
    }
    schemas = {
        key: {"type": kind} | ({"nullable": True} if nullable else {}) for key, (kind, nullable) in types.items()
    }
    return draw(NAMES), schemas, draw(st.lists(st.fixed_dictionaries(values), min_size=1, max_size=3))


NEWLY_READ = r"qwen3_(5_(no)?think|6|8)(_training)?|nemotron_3.*|glm4moe|lfm2_(2_5.*|v2.*)"
WRITERS = [
    f"trl {name}" for name in ("qwen3_5_think", "qwen3_8", "nemotron_3_nano", "glm4moe", "lfm2_v2", "lfm2_2_5_vl")
]


@pytest.mark.parametrize("writer", [*FORMS, *(name for name in WRITERS if trl_templates())])
@repeatable
@given(typed_calls())
def test_the_calls_that_a_template_writes_are_read_back_equal(writer, case):
    name, types, calls = case
    tokenizer = trl_tokenizer(writer[4:]) if writer.startswith("trl ") else renderer_of(writer)[0]
    schemas = [tool(name, types)]
    turn = {
        "role": "assistant",
        "content": "So: ",
        "tool_calls": [{"type": "function", "function": {"name": name, "arguments": call}} for call in calls],
    }
    text = tokenizer.apply_chat_template([{"role": "user", "content": "?"}, turn], tools=schemas, tokenize=False)
    renderer = make_renderer(tokenizer, format="chat", schemas=schemas)
    ids = tokenizer.encode(text.rpartition("So:")[2], add_special_tokens=False)
    renderer._opened = ""
    expected = [(name, call, None) for call in calls]
    assert repr([(call.name, dict(call.arguments), call.error) for call in renderer.calls(ids)]) == repr(expected)


@pytest.mark.parametrize("name", [name for name in trl_templates() if re.fullmatch(NEWLY_READ, name)])
def test_the_answers_to_several_calls_follow_as_the_template_writes_them(name):
    tokenizer = trl_tokenizer(name)
    calls = [{"type": "function", "function": {"name": "f", "arguments": {"s": word}}} for word in ("one", "two")]
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "So:", "tool_calls": calls},
        *({"role": "tool", "name": "f", "content": answer} for answer in ("4711", "4712")),
    ]
    whole = tokenizer.apply_chat_template(
        messages, tools=[tool("f", TYPES)], tokenize=False, add_generation_prompt=True
    )
    turn, tag, after = re.fullmatch(
        r"(?s:.*)(So:(?s:.*))(</tool_call>|<\|tool_call_end\|>)\n?((?s:.*))", whole
    ).groups()
    renderer = make_renderer(tokenizer, format="chat", schemas=[tool("f", TYPES)])
    ids = tokenizer.encode(f"</think>{turn}{tag}", add_special_tokens=False)
    assert [call.arguments for call in renderer.calls(ids)] == [{"s": "one"}, {"s": "two"}]
    assert tokenizer.decode(renderer.bridge(ids, [("f", "4711"), ("f", "4712")], stopped=False)) == after
