import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from flatpeak.errors import UserError
from flatpeak.tasks.prompts import PromptConfig, build_prompts, prompt_texts
from flatpeak.types import Completion, Example
from flatpeak.utils.answers import judged_text

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|start|>{{ m['role'] }}:{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant:{% if quick %}!{% endif %}{% endif %}"
)
SPECIAL = ["<bos>", "<eos>", "<|start|>", "<|end|>"]


def make_tokenizer(*, ends=False, chat_template=CHAT_TEMPLATE):
    """One token per character; a <bos> in front, and with `ends` an <eos> behind."""
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *map(chr, range(1, 128))])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=chr(1)))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    backend.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>" if ends else "<bos> $A", special_tokens=[("<bos>", 0), ("<eos>", 1)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>", extra_special_tokens=SPECIAL[2:]
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def examples(*questions):
    return [Example(id=f"e{i}", question=question, gold="0") for i, question in enumerate(questions)]


def build(*questions, tokenizer=None, max_tokens=10_000, **config):
    tokenizer = tokenizer or make_tokenizer()
    return build_prompts(examples(*questions), tokenizer, PromptConfig(**config), max_tokens=max_tokens)


def decoded(prompt):
    return make_tokenizer().decode(prompt.token_ids)


@pytest.mark.parametrize("template", ["plain", "question_only"])
def test_plain_is_the_question_behind_the_beginning_of_sequence(template):
    (prompt,) = build("12+34=", template=template).prompts
    assert prompt.text == "12+34="
    assert decoded(prompt) == "<bos>12+34="
    assert (prompt.id, prompt.example.question, prompt.messages) == ("e0", "12+34=", None)


def test_r1_zero_names_the_tags_and_ends_inside_the_reasoning():
    (prompt,) = build("How many {x}?", template="r1_zero").prompts
    before, after = prompt.text.split("How many {x}?")
    assert after == "\nAssistant: <think>"
    assert before.endswith("User: ")
    assert "<think> " in before
    assert before.index("</think> <answer>") < before.index("</answer>.")
    assert decoded(prompt) == "<bos>" + prompt.text


def test_an_appended_end_of_sequence_is_removed_and_a_written_one_is_text():
    ends = make_tokenizer(ends=True)
    assert ends.encode("ab")[-1] == ends.eos_token_id
    plain, written = build("ab", "ab<eos>", tokenizer=ends).prompts
    assert decoded(plain) == "<bos>ab"
    assert decoded(written) == "<bos>ab<eos>"
    assert decoded(build("ab<eos>").prompts[0]) == "<bos>ab<eos>"
    assert ends.eos_token_id not in (*plain.token_ids, *written.token_ids)
    (of_the_template,) = build("ab", tokenizer=ends, template="{question}<eos>").prompts
    assert of_the_template.token_ids == (*plain.token_ids, ends.eos_token_id)


def test_chat_has_one_beginning_of_sequence_and_ends_at_the_assistants_turn():
    (prompt,) = build("Why?", template="chat", system="Be brief.").prompts
    assert prompt.text == "<bos><|start|>system:Be brief.<|end|><|start|>user:Why?<|end|><|start|>assistant:"
    assert decoded(prompt) == prompt.text
    assert prompt.token_ids.count(0) == 1
    assert prompt.messages == ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"})


def test_a_template_that_writes_the_beginning_of_sequence_has_it_once():
    (prompt,) = build("Why?", template="<bos>Q: {question}").prompts
    assert decoded(prompt) == prompt.text == "<bos>Q: Why?"
    (twice,) = build("Why?", template="<bos><bos>{question}").prompts
    assert decoded(twice) == "<bos><bos>Why?"


def test_a_chat_template_writes_the_same_date_on_every_day():
    dated = make_tokenizer(chat_template="{{ strftime_now('%d %b %Y') }} " + CHAT_TEMPLATE)
    (prompt,) = build("Why?", template="chat", tokenizer=dated).prompts
    assert prompt.text.startswith("01 Jan 2026 <bos>")
    (own,) = build("Why?", template="chat", chat_template_kwargs={"quick": True}, tokenizer=dated).prompts
    assert own.text == prompt.text + "!"
    given = {"chat_template": "mine {{ messages[0].content }}"}
    (mine,) = build("Why?", template="chat", chat_template_kwargs=given, tokenizer=dated).prompts
    assert mine.text == "mine Why?"


def test_chat_without_a_system_message_has_none_and_takes_template_arguments():
    (prompt,) = build("Why?", template="chat", chat_template_kwargs={"quick": True}).prompts
    assert prompt.text == "<bos><|start|>user:Why?<|end|><|start|>assistant:!"


def test_the_users_message_has_its_words_around_the_question():
    (prompt,) = build("Why {x}?", template="chat", user='Q: {question}\nAs {"a": 1}.').prompts
    assert prompt.text == '<bos><|start|>user:Q: Why {x}?\nAs {"a": 1}.<|end|><|start|>assistant:'
    assert prompt.messages == ({"role": "user", "content": 'Q: Why {x}?\nAs {"a": 1}.'},)
    short = build("abcdef", template="chat", user="Q: {question}!", max_tokens=24, overlong="truncate_left").prompts[0]
    assert short.text == "<bos><|start|>user:Q: f!<|end|><|start|>assistant:"
    with pytest.raises(ValueError, match=r"prompt\.user='As JSON\.': write \{question\} where the question belongs"):
        PromptConfig(user="As JSON.")


@pytest.mark.parametrize(
    ("config", "question", "thinks"),
    [
        ({}, "Q <think>", False),
        ({"template": "{question}\n"}, "Q <think>", False),
        ({"template": "r1_zero"}, "Q", True),
        ({"template": "r1_zero"}, "<think>", True),
        ({"template": "r1_zero"}, "", True),
        ({"template": "chat"}, "Q <think>", False),
    ],
)
def test_only_a_template_opens_the_thinking(config, question, thinks):
    (prompt,) = build(question, **config).prompts
    answer = Completion(token_ids=(1,), logprobs=(0.0,), finish_reason="stop", text="\\boxed{4}")
    assert judged_text(answer, prompt) == ("<think>" if thinks else "") + answer.text
    bare = "{{ messages[0].content }}"
    (prompt,) = build("Q <think>", template="chat", tokenizer=make_tokenizer(chat_template=bare)).prompts
    assert judged_text(answer, prompt) == answer.text
    thinking = "{{ messages[0].content }}{{ '<think>\n' }}"
    (prompt,) = build("Q", template="chat", tokenizer=make_tokenizer(chat_template=thinking)).prompts
    assert judged_text(answer, prompt) == "<think>\n" + answer.text


def test_a_template_file_keeps_every_other_brace(tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text('Put it in \\boxed{}, {"a": {x}}.\nQ: {question}\nA:\n')
    (prompt,) = build("{question} or {x}?", template=str(file)).prompts
    assert prompt.text == 'Put it in \\boxed{}, {"a": {x}}.\nQ: {question} or {x}?\nA:'


def test_only_one_final_line_break_of_a_template_file_is_the_editors(tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text("{question}\n\n")
    assert build("Q", template=str(file)).prompts[0].text == "Q\n"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"template": "r1-zero"}, r"neither a file nor one of plain, .*did you mean 'r1_zero'\?"),
        ({"template": "prompts/absent.txt"}, "neither a file nor one of"),
        ({"system": "Be brief."}, "prompt.system needs a chat template: set prompt.template=chat"),
        ({"user": "Q: {question}"}, "prompt.user needs a chat template: set prompt.template=chat"),
        ({"chat_template_kwargs": {"a": 1}}, "prompt.chat_template_kwargs needs a chat template"),
        ({"template": "chat", "chat_template_kwargs": {"tokenize": True}}, "kwargs.tokenize is not a choice"),
        ({"max_tokens": 0}, "completions leave no room for a prompt in the model's context"),
    ],
)
def test_settings_that_cannot_work_are_errors(config, message):
    with pytest.raises(UserError, match=message):
        build("Q", **config)


def test_a_longest_prompt_of_no_tokens_is_an_error_that_names_its_setting():
    with pytest.raises(UserError, match=r"^prompt\.max_tokens=0: a prompt has at least 1 token; raise it$"):
        build_prompts(examples("Q"), make_tokenizer(), PromptConfig(max_tokens=0), max_tokens=100)


def test_a_file_without_the_placeholder_is_an_error(tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text("Q: {Question}")
    with pytest.raises(UserError, match=r"no \{question\} in the file"):
        build("Q", template=str(file))
    file.write_bytes(b"\xff{question}")
    with pytest.raises(UserError, match="not UTF-8"):
        build("Q", template=str(file))


def test_a_tokenizer_without_a_chat_template_is_an_error_with_a_way_out():
    with pytest.raises(UserError, match=r"no chat template; use prompt.template=r1_zero, plain or a file"):
        build("Q", template="chat", tokenizer=make_tokenizer(chat_template=None))


def test_a_chat_template_that_refuses_a_system_message_is_an_error_with_a_way_out():
    refuses = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}x"
    with pytest.raises(UserError, match=r"refuses the messages \(no system role\); remove prompt.system"):
        build("Q", template="chat", system="S", tokenizer=make_tokenizer(chat_template=refuses))


@pytest.mark.parametrize("template", ["{% for i in range(10**9) %}x{% endfor %}", "{{ messages[0].content + 1 }}"])
def test_whatever_a_chat_template_raises_is_an_error_of_one_line(template):
    with pytest.raises(UserError, match=r"^prompt.template=chat: the chat template refuses the messages \(.*[^\n]$"):
        build("Q", template="chat", tokenizer=make_tokenizer(chat_template=template))


def test_overlong_prompts_are_an_error_that_counts_them_and_names_the_fixes():
    with pytest.raises(UserError) as caught:
        build("12345", "1234", "123456789", max_tokens=5)
    assert str(caught.value) == (
        "2 of 3 prompts exceed 5 tokens (the longest has 10, example 'e2'): set prompt.overlong=drop or "
        "truncate_left, or a smaller rollout.max_new_tokens"
    )
    config = PromptConfig(max_tokens=5)
    with pytest.raises(UserError, match=r"or a larger prompt\.max_tokens"):
        build_prompts(examples("12345"), make_tokenizer(), config, max_tokens=100)


def test_the_smaller_of_both_limits_holds():
    def fits(config_limit, limit):
        config = PromptConfig(max_tokens=config_limit, overlong="drop")
        return build_prompts(examples("1", "12345"), make_tokenizer(), config, max_tokens=limit).dropped == 0

    assert fits(None, 6) and fits(6, 6) and fits(100, 6) and fits(6, 100)
    assert not fits(None, 5) and not fits(5, 100) and not fits(100, 5)


def test_drop_leaves_overlong_prompts_out_and_counts_them():
    result = build("12345", "1234", "123456789", "", max_tokens=5, overlong="drop")
    assert [prompt.id for prompt in result.prompts] == ["e1", "e3"]
    assert (result.dropped, result.truncated) == (2, 0)


def test_dropping_everything_is_an_error():
    with pytest.raises(UserError, match=r"2 of 2 prompts exceed 3 tokens.*set prompt.overlong=truncate_left"):
        build("12345", "1234", max_tokens=3, overlong="drop")


def test_truncate_left_keeps_the_longest_end_of_the_question():
    result = build("abcdefghij", "xyz", max_tokens=5, overlong="truncate_left")
    assert [decoded(prompt) for prompt in result.prompts] == ["<bos>ghij", "<bos>xyz"]
    assert result.prompts[0].text == "ghij"
    assert result.prompts[0].example.question == "abcdefghij"
    assert (result.dropped, result.truncated) == (0, 1)


def test_truncate_left_keeps_the_system_message_and_the_assistants_header():
    whole = build("x" * 200 + "END", template="chat", system="S").prompts[0]
    config = {"template": "chat", "system": "S", "overlong": "truncate_left"}
    for limit in range(len(whole.token_ids) - 202, len(whole.token_ids)):
        (prompt,) = build("x" * 200 + "END", max_tokens=limit, **config).prompts
        assert len(prompt.token_ids) == limit
        assert prompt.text.startswith("<bos><|start|>system:S<|end|><|start|>user:")
        assert prompt.text.endswith("D<|end|><|start|>assistant:")
        assert prompt.messages[-1]["content"] == ("x" * 200 + "END")[-len(prompt.messages[-1]["content"]) :]


def test_a_template_that_alone_is_too_long_is_an_error():
    with pytest.raises(UserError, match=r"'e0': .* the prompt has 20 tokens, and 19 fit; use a shorter"):
        build("y" * 50, template="chat", max_tokens=19, overlong="truncate_left")


def test_an_empty_prompt_is_an_error():
    bare = make_tokenizer()
    bare.backend_tokenizer.post_processor = processors.TemplateProcessing(single="$A", special_tokens=[])
    with pytest.raises(UserError, match="'e1' makes an empty prompt"):
        build("fine", "", tokenizer=bare)
    ends = make_tokenizer()
    ends.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <eos>", special_tokens=[("<eos>", 1)]
    )
    with pytest.raises(UserError, match="'e0' makes an empty prompt"):
        build("", tokenizer=ends)


def test_equal_questions_make_separate_prompts():
    result = build("same", "same")
    assert [prompt.id for prompt in result.prompts] == ["e0", "e1"]
    assert result.prompts[0].token_ids == result.prompts[1].token_ids


def test_no_examples_make_no_prompts():
    assert build().prompts == ()


def test_the_texts_for_a_new_tokenizer_are_those_of_the_prompts():
    rows = examples("1+2=", "{x}?")
    for template in ("plain", "r1_zero"):
        config = PromptConfig(template=template)
        prompts = build_prompts(rows, make_tokenizer(), config, max_tokens=10_000).prompts
        assert prompt_texts(rows, config) == [prompt.text for prompt in prompts]
    with pytest.raises(UserError, match=r"prompt\.template=chat needs a tokenizer with a chat template"):
        prompt_texts(rows, PromptConfig(template="chat"))


def shown(*, shots=("Q1 A1. ", "Q2 A2. ", "Q3 A3. "), question="Q? ", preamble="Do: "):
    return Example(id="e0", question=question, gold="0", preamble=preamble, shots=shots)


def built(example, *, max_tokens=10_000, tokenizer=None, **config):
    tokenizer = tokenizer or make_tokenizer()
    return build_prompts([example], tokenizer, PromptConfig(**config), max_tokens=max_tokens)


def test_preamble_and_shots_stand_before_the_question_in_a_text_and_in_a_users_message(tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text("<<{question}>>")
    worded = "Do: Q1 A1. Q2 A2. Q3 A3. Q? "
    assert built(shown()).prompts[0].text == worded
    assert built(shown(), template=str(file)).prompts[0].text == f"<<{worded}>>"
    (prompt,) = built(shown(), template="chat", system="S").prompts
    assert prompt.messages[1] == {"role": "user", "content": worded}
    assert decoded(prompt).endswith(f"user:{worded}<|end|><|start|>assistant:")


def test_shots_are_left_out_from_the_last_on_until_the_prompt_fits():
    texts = []
    for limit in range(len("Do: Q? ") + 1, 31):
        result = built(shown(), max_tokens=limit)
        (prompt,) = result.prompts
        assert len(prompt.token_ids) <= limit
        assert result.fewer_shots == (limit < 29)
        assert (result.dropped, result.truncated) == (0, 0)
        texts.append(prompt.text)
    assert [len(text) for text in texts] == [7] * 7 + [14] * 7 + [21] * 7 + [28] * 2
    assert texts[7] == "Do: Q1 A1. Q? "
    assert built(shown(), max_tokens=29).prompts[0].text == "Do: Q1 A1. Q2 A2. Q3 A3. Q? "


def test_what_is_too_long_without_shots_is_overlong():
    with pytest.raises(UserError, match=r"1 of 1 prompts exceed 7 tokens \(the longest has 8, example '\w+'\)"):
        built(shown(), max_tokens=7)
    result = build_prompts([shown(), *examples("x")], make_tokenizer(), PromptConfig(overlong="drop"), max_tokens=7)
    assert ([prompt.text for prompt in result.prompts], result.dropped, result.fewer_shots) == (["x"], 1, 0)
    result = built(shown(question="abcdef"), max_tokens=8, overlong="truncate_left")
    assert (result.prompts[0].text, result.truncated, result.fewer_shots) == ("Do: def", 1, 1)


def test_equal_tokens_of_many_prompts_are_one_object():
    class Fresh:
        """A tokenizer whose ids are new objects every time, as ids above 256 are."""

        eos_token_id = None

        def encode(self, text, *, add_special_tokens=True):
            return [int(f"{1000 + ord(character)}") for character in text]

    first, second = build_prompts(examples("aa", "a"), Fresh(), PromptConfig(), max_tokens=10).prompts
    assert first.token_ids == (1097, 1097)
    assert first.token_ids[0] is first.token_ids[1] is second.token_ids[0]


def test_a_new_tokenizer_sees_every_preamble_and_shot_once():
    rows = [shown(), shown(question="R? "), *examples("plain")]
    assert prompt_texts(rows, PromptConfig()) == ["Q? ", "R? ", "plain", "Do: ", "Q1 A1. ", "Q2 A2. ", "Q3 A3. "]


def test_a_template_may_be_its_text_itself_and_equals_that_of_a_file(tmp_path):
    file = tmp_path / "ask.txt"
    file.write_text("Q {x} {question}?\n")
    (by_file,), (by_text,) = (build("1+1", template=one).prompts for one in (str(file), "Q {x} {question}?"))
    assert by_text.text == by_file.text == "Q {x} 1+1?"
    assert by_text.token_ids == by_file.token_ids
    # A text says itself how it ends; only an editor's line break at the end of a file is not meant.
    assert build("1", template="{question}\n").prompts[0].text == "1\n"


@pytest.mark.parametrize(
    "template", ["{% if never %}\ud800{% endif %}" + CHAT_TEMPLATE, {"default": CHAT_TEMPLATE, "tools": "\ud800"}]
)
@pytest.mark.parametrize("wording", ["plain", "chat"])
def test_half_of_a_character_in_a_chat_template_is_refused_before_a_checkpoint_needs_it(template, wording):
    with pytest.raises(UserError, match=r"the tokenizer's chat template \(\w+\): '.ud800' is half of a character"):
        build("1+1", tokenizer=make_tokenizer(chat_template=template), template=wording)


def test_half_of_a_character_in_a_question_is_refused_by_its_example():
    with pytest.raises(UserError, match=r"the question of example 'e1': '.ud83d' is half of a character"):
        build("1+1", "\ud83d", template="plain")


def test_half_of_a_character_is_refused_before_a_new_tokenizer_is_built_of_it():
    with pytest.raises(UserError, match=r"the question of example 'e0': '.ud83d' is half of a character"):
        prompt_texts(examples("\ud83d"), PromptConfig(template="plain"))
    rationale = Example(id="r", question="1+1", gold="2", rationale="\ud83d")
    with pytest.raises(UserError, match=r"the rationale of example 'r': '.ud83d' is half of a character"):
        prompt_texts([rationale], PromptConfig(template="plain"))
    for parts in ({"preamble": "\ud83d"}, {"shots": ("1+1? 2", "\ud83d")}):
        example = Example(id="s", question="2+2?", gold="4", **parts)
        with pytest.raises(UserError, match=r"the preamble or shots of example 's': '.ud83d' is half of a character"):
            build_prompts([example], make_tokenizer(), PromptConfig(), max_tokens=100)
