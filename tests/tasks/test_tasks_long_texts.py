import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from flatpeak.errors import UserError
from flatpeak.tasks import long_texts
from flatpeak.tasks.long_texts import bounded_tokens
from flatpeak.tasks.prompts import PromptConfig, build_prompts
from flatpeak.types import Example

CHAT_TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
LETTERS = "abc \n"


def make_tokenizer():
    """A byte-pair tokenizer with tokens of one to eight characters."""
    pairs = [("a", "b"), ("ab", "c"), ("a", "a"), ("aa", "aa"), ("aaaa", "aaaa"), (" ", " "), ("  ", "abc")]
    names = [*map(chr, range(1, 128)), *("".join(pair) for pair in pairs)]
    backend = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=pairs))
    backend.pre_tokenizer = pre_tokenizers.Split("\n", "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


TOKENIZER = make_tokenizer()


def outcome(questions, *, limit, **config):
    """The prompts and counts, or the error."""
    examples = [Example(id=f"e{i}", question=question, gold="0") for i, question in enumerate(questions)]
    try:
        return build_prompts(examples, TOKENIZER, PromptConfig(**config), max_tokens=limit)
    except UserError as error:
        return str(error).replace("at least ", "").rpartition("(the longest")[0] or str(error)


@settings(max_examples=150, deadline=None)
@given(
    pieces=st.lists(st.text(alphabet=LETTERS, min_size=1, max_size=4), min_size=1, max_size=4),
    repeats=st.integers(1, 120),
    limit=st.integers(20, 90),
    template=st.sampled_from(["plain", "chat"]),
    overlong=st.sampled_from(["error", "drop", "truncate_left"]),
)
def test_a_prompt_measured_by_its_beginning_is_treated_as_one_tokenized_whole(
    pieces, repeats, limit, template, overlong
):
    questions = ["a", "".join(pieces) * repeats]
    whole = outcome(questions, limit=limit, template=template, overlong=overlong)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(long_texts, "_ALWAYS_WHOLE", 10)
        patch.setattr(long_texts, "_USUAL_TOKEN", 1)
        patch.setattr(long_texts, "_CUT_MARGIN", 10)
        assert outcome(questions, limit=limit, template=template, overlong=overlong) == whole


def test_the_error_about_a_text_measured_by_its_beginning_gives_a_bound():
    examples = [Example(id="long", question="b" * 500_000, gold="0")]
    with pytest.raises(UserError, match=r"exceed 20 tokens \(the longest has at least 100000, example 'long'\)"):
        build_prompts(examples, TOKENIZER, PromptConfig(), max_tokens=20)


def test_a_long_text_of_long_tokens_is_tokenized_whole_if_it_fits():
    text = "aaaaaaaa" * 30_000
    assert len(bounded_tokens(text, 30_000, encode=TOKENIZER.encode)) == 30_000
    words = "wo " * 100_000
    assert bounded_tokens(words, 10, encode=str.split) == ("wo",) * 33_333 + ("w",)
    assert len(bounded_tokens(words, 200_000, encode=str.split)) == 100_000


@pytest.mark.parametrize("template", ["plain", "chat"])
@pytest.mark.parametrize("overlong", ["error", "drop", "truncate_left"])
def test_a_question_of_50_mb_takes_seconds(template, overlong):
    questions = ["a", "abc cab bca\n" * 4_200_000]
    start = time.perf_counter()
    result = outcome(questions, limit=1000, template=template, overlong=overlong)
    assert time.perf_counter() - start < 20  # whole, it takes more than a minute
    if overlong == "error":
        assert result == "1 of 2 prompts exceed 1000 tokens "
    else:
        assert [len(prompt.token_ids) <= 1000 for prompt in result.prompts] == [True] * (
            2 if overlong == "truncate_left" else 1
        )
