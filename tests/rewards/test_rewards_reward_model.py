"""A sequence-classification model as a reward: what it reads, where its score is read, and what has none."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    GPT2Config,
    LlamaConfig,
    Qwen2Config,
    T5Config,
)

from flatpeak.errors import UserError
from flatpeak.policy.config import TokenizerConfig
from flatpeak.policy.loading import build_tokenizer
from flatpeak.rewards.config import SequenceClassifierConfig
from flatpeak.rewards.reward_model import ModelScorer
from flatpeak.rewards.reward_set import build_reward
from flatpeak.rewards.sequence_classifier import (
    PLAIN,
    RECORD,
    Classifier,
    Encoded,
    Record,
    Spread,
    Wording,
    length_batches,
    load_model,
    locate,
    make_wording,
    read_record,
)
from flatpeak.types import Group

LETTERS = "abcdefghijklmnopqrstuvwxyz :\n?{}<|>"
CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}|{% endfor %}"
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
EOS = 1

pytestmark = pytest.mark.usefixtures("one_thread")


def tokenizer(**settings: Any) -> Any:
    made = build_tokenizer(TokenizerConfig(), [LETTERS])
    for name, value in settings.items():
        setattr(made, name, value)
    return made


def config_of(architecture: str, **settings: Any) -> Any:
    """A tiny config with dropout, so that a model left in train mode shows."""
    common = {"vocab_size": len(tokenizer()), "num_labels": 1, "pad_token_id": None, **settings}
    match architecture:
        case "llama":
            return LlamaConfig(**SIZES, max_position_embeddings=64, attention_dropout=0.5, **common)
        case "qwen2":
            return Qwen2Config(**SIZES, num_key_value_heads=1, max_position_embeddings=64, **common)
        case "gpt2":
            return GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=64, resid_pdrop=0.5, **common)
        case "bert":
            return BertConfig(**SIZES, max_position_embeddings=64, hidden_dropout_prob=0.5, **common)
        case _:
            sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2}
            return T5Config(**sizes, decoder_start_token_id=0, eos_token_id=EOS, **common)


def model_of(architecture: str, **settings: Any) -> Any:
    """Random weights, large enough that scores of different texts are far apart."""
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(config_of(architecture, **settings))
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(8)
    return model


def classifier(architecture: str = "llama", *, template: str = PLAIN, max_tokens: int | None = None, **settings: Any):
    return Classifier(
        model_of(architecture, **settings), Wording(tokenizer=tokenizer(), template=template, max_tokens=max_tokens)
    )


def save(directory: Path, model: Any, made: Any, record: Record | None = None) -> Path:
    model.save_pretrained(directory)
    made.save_pretrained(directory)
    if record is not None:
        record.write(directory)
    return directory


def load(path: Path, **settings: Any) -> ModelScorer:
    return SequenceClassifierConfig(path=str(path), device="cpu", **settings).build("helpful")  # type: ignore[return-value]


TEXTS = [[5, 9, 6, EOS], [7, 4, EOS], [8, 12, 9, 30, 4, 5, 6, 11, EOS], [10], [0, 3, 0, EOS, 0], [9, 9, 9, 9, EOS]]


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gpt2", "bert"])
@pytest.mark.parametrize("pad", [None, 0, EOS])
def test_scores_in_a_batch_are_those_of_each_text_alone(architecture: str, pad: int | None) -> None:
    model = classifier(architecture, pad_token_id=pad)
    with torch.no_grad():
        # transformers' own forward on one text; its last token is the last place, where no token is padding.
        alone = [model.model(torch.tensor([text])).logits[0, 0].item() for text in TEXTS if pad not in text]
    result = model.score_all(TEXTS)
    compared = [score for score, text in zip(result, TEXTS, strict=True) if pad not in text]
    assert compared == pytest.approx(alone, abs=1e-5)
    assert result == pytest.approx([model.score_all([text])[0] for text in TEXTS], abs=1e-5)
    assert len({round(score, 3) for score in result}) >= len(TEXTS) - 1


def test_the_end_of_a_text_is_read_also_where_it_is_the_padding_token() -> None:
    model = classifier("llama", pad_token_id=EOS)
    ended, open_end = model.score_all([[5, 9, 6, EOS], [5, 9, 6]])
    assert abs(ended - open_end) > 0.01
    with torch.no_grad():
        # What transformers reads there: the last token that is not the padding token.
        theirs = model.model(torch.tensor([[5, 9, 6, EOS]])).logits[0, 0].item()
    assert theirs == pytest.approx(open_end, abs=1e-5)


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_tokenizers_padding_side_changes_nothing(side: str) -> None:
    plain, padded = tokenizer(), tokenizer(padding_side=side)
    scores = [
        Classifier(model_of("llama"), Wording(tokenizer=made, template=PLAIN)).score_all(TEXTS)
        for made in (plain, padded)
    ]
    assert scores[0] == scores[1]


def test_a_model_that_must_not_be_padded_reads_its_texts_one_by_one() -> None:
    texts = [[*text, EOS] for text in ([5, 9, 6], [7], [4, 8, 12, 9, 30])]
    model = classifier("t5", pad_token_id=0)
    alone = [model.score_all([text])[0] for text in texts]
    assert model.score_all(texts) == pytest.approx(alone, abs=1e-6)
    assert len({round(score, 3) for score in alone}) == 3


def test_a_model_that_reads_the_last_place_of_its_input_is_not_padded() -> None:
    class LastPlace(torch.nn.Module):
        base_model_prefix = "body"
        config = BertConfig(vocab_size=len(tokenizer()), pad_token_id=0)

        def __init__(self) -> None:
            super().__init__()
            self.values = torch.nn.Embedding(len(tokenizer()), 1)

        def forward(self, *, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
            return SimpleNamespace(logits=self.values(input_ids)[:, -1])

    torch.manual_seed(0)
    model = LastPlace()
    result = Classifier(model, Wording(tokenizer=tokenizer(), template=PLAIN)).score_all([[5, 6, 7], [8, 9], [4]])
    assert result == pytest.approx([model.values.weight[token].item() for token in (7, 9, 4)])


def test_micro_batches_hold_the_budget_and_change_no_score() -> None:
    lengths = [4, 9, 2, 9, 1, 5]
    assert list(length_batches(lengths, budget=18)) == [[1, 3], [5, 0, 2], [4]]
    assert list(length_batches(lengths, budget=1)) == [[1], [3], [5], [0], [2], [4]]
    assert list(length_batches([], budget=5)) == []
    model = classifier()
    assert model.score_all(TEXTS, batch_tokens=1) == pytest.approx(model.score_all(TEXTS, batch_tokens=99), abs=1e-5)


def test_dropout_is_off() -> None:
    model = classifier("gpt2")
    model.model.train()
    assert Classifier(model.model, model.wording).score_all(TEXTS) == classifier("gpt2").score_all(TEXTS)
    assert not model.model.training


def test_the_plain_template_is_question_empty_line_completion_and_end() -> None:
    made = tokenizer()
    result = Wording(tokenizer=made, template=PLAIN).encode("why?", "so")
    assert result == Encoded(token_ids=(*made.encode("why?\n\nso"), EOS), truncated=False)


def test_a_template_of_ones_own_is_filled_once() -> None:
    made = tokenizer()
    wording = Wording(tokenizer=made, template="q: {prompt}\na: {completion}?")
    result = wording.encode("what is {completion}", "{prompt}")
    assert result is not None
    assert result.token_ids == (*made.encode("q: what is {completion}\na: {prompt}?"), EOS)


def test_an_end_that_the_tokenizer_writes_is_not_written_twice() -> None:
    class Closing:
        eos_token_id = EOS
        chat_template = None

        def encode(self, text: str, **options: Any) -> list[int]:
            return [2, *range(10, 10 + len(text)), EOS]

    result = Wording(tokenizer=Closing(), template="{prompt}{completion}").encode("ab", "c")
    assert result is not None
    assert result.token_ids == (2, 10, 11, 12, EOS)


def test_the_chat_template_gets_the_question_as_the_users_message() -> None:
    made = tokenizer(chat_template=CHAT)
    wording = Wording(tokenizer=made, template="chat")
    result = wording.encode("why?", "so")
    assert result is not None
    assert list(result.token_ids) == made.encode("<user>why?|<assistant>so|")
    result = wording.encode([{"role": "system", "content": "be kind"}, {"role": "user", "content": "why?"}], "so")
    assert result is not None
    assert list(result.token_ids) == made.encode("<system>be kind|<user>why?|<assistant>so|")


def test_the_beginning_of_a_long_question_is_left_out_and_nothing_else() -> None:
    made = tokenizer(chat_template=CHAT)
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "abcdefgh"}]
    whole = made.encode("<system>s|<user>abcdefgh|<assistant>answer|")
    result = Wording(tokenizer=made, template="chat", max_tokens=len(whole) - 3).encode(chat, "answer")
    assert result == Encoded(token_ids=tuple(made.encode("<system>s|<user>defgh|<assistant>answer|")), truncated=True)
    plain = Wording(tokenizer=made, template=PLAIN, max_tokens=9)
    assert plain.encode("abcdefgh", "answer") == Encoded(token_ids=(*made.encode("\n\nanswer"), EOS), truncated=True)
    assert plain.encode("abcdefgh", "answers") is None
    assert plain.encode("", "answer") == Encoded(token_ids=(*made.encode("\n\nanswer"), EOS), truncated=False)


@pytest.fixture
def ask(prompt: Callable[..., Any], completion: Callable[..., Any]) -> Callable[..., Group]:
    """`ask("a", "b", ...)`: a question and its answers, in tokens that mean nothing to the reward model."""

    def make(*answers: str, **settings: Any) -> Group:
        return Group(
            prompt=prompt(**settings), completions=tuple(completion(text, tokens=900 + len(text)) for text in answers)
        )

    return make


def test_scores_come_back_in_the_order_of_groups_and_completions(ask: Callable[..., Group]) -> None:
    model = classifier()
    groups = [ask("a", "long answer", "b"), ask("c", id="row-2"), ask("dd", "e", id="row-3")]
    result = ModelScorer(model, batch_tokens=16).score(groups)
    for group, scores in zip(groups, result.scores, strict=True):
        for completion, score in zip(group.completions, scores, strict=True):
            texts = model.wording.encode(group.prompt.example.question, completion.text)
            assert texts is not None
            assert score == pytest.approx(model.score_all([texts.token_ids])[0], abs=1e-5)
    assert (result.failed, result.first_error) == (0, None)


def test_the_policys_tokens_and_its_wording_of_the_prompt_are_not_looked_at(ask: Callable[..., Group]) -> None:
    scorer = ModelScorer(classifier())
    one, other = ask("so", text="How many?"), ask("so", text="<|policy|>How many?<think>")
    assert scorer.score([one]).scores == scorer.score([other]).scores


def test_chat_messages_reach_a_model_with_a_chat_template_alone(ask: Callable[..., Group]) -> None:
    made = tokenizer(chat_template=CHAT)
    system = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "How many?"}]
    row = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "go"},
    ]
    groups = [ask("so"), ask("so", messages=system)]
    seen: list[str] = []

    def score_all(texts: Any, **options: Any) -> list[float]:
        seen.extend(made.decode(text) for text in texts)
        return [0.0] * len(texts)

    model = classifier(template="chat")
    object.__setattr__(model.wording, "tokenizer", made)
    model.score_all = score_all  # type: ignore[method-assign]
    ModelScorer(model).score(groups)
    asked = replace(groups[0].prompt, example=replace(groups[0].prompt.example, columns={"messages": row}))
    ModelScorer(model).score([replace(groups[0], prompt=asked)])
    answered = replace(asked, example=replace(asked.example, columns={"messages": row[:2]}))
    ModelScorer(model).score([replace(groups[0], prompt=answered)])
    worded = replace(groups[1].prompt, example=asked.example)  # by the recipe's prompt section
    ModelScorer(model).score([replace(groups[0], prompt=worded)])
    assert [text.replace("<unk>", "H") for text in seen] == [
        "<user>How many?|<assistant>so|",
        "<system>be kind|<user>How many?|<assistant>so|",
        "<user>hi|<assistant>yes|<user>go|<assistant>so|",
        "<user>How many?|<assistant>so|",
        "<system>be kind|<user>How many?|<assistant>so|",
    ]


def test_a_score_that_is_not_finite_is_missing(ask: Callable[..., Group]) -> None:
    model = classifier()
    model.score_all = lambda texts, **options: [float("nan"), 1.0, float("inf")]  # type: ignore[method-assign]
    result = ModelScorer(model).score([ask("a", "b", "c")])
    assert result.scores == [[None, 1.0, None]]
    assert result.failed == 2
    assert str(result.first_error) == "the reward model's score is not finite"


def test_a_completion_that_does_not_fit_has_no_score_and_a_shortened_question_is_counted(
    ask: Callable[..., Group],
) -> None:
    scorer = ModelScorer(classifier(max_tokens=8))
    result = scorer.score([ask("so", "much too long")])
    assert result.scores[0][0] is not None
    assert result.scores[0][1] is None
    assert (result.failed, scorer.truncated) == (1, 1)
    assert "max_tokens=8" in str(result.first_error)
    assert scorer.metrics() == {"reward/preference/shortened": 1.0}
    assert scorer.metrics() == {}


def test_scores_are_standardized_then_clipped(ask: Callable[..., Group]) -> None:
    model = classifier()
    model.score_all = lambda texts, **options: [5.0, 3.0, -9.0]  # type: ignore[method-assign]
    scorer = ModelScorer(model, spread=Spread(mean=3.0, std=4.0, count=2), clip=(-1.0, 0.25))
    assert scorer.score([ask("a", "b", "c")]).scores == [[0.25, 0.0, -1.0]]


def test_no_completions_have_no_scores() -> None:
    assert ModelScorer(classifier()).score([]).scores == []


def test_a_recipe_names_a_run_a_checkpoint_or_its_own_template(tmp_path: Path, ask: Callable[..., Group]) -> None:
    record = Record(template="{prompt}>{completion}", max_tokens=40, scores=Spread(mean=1.0, std=2.0, count=9))
    run = tmp_path / "run"
    save(run / "checkpoints" / "step_000004", model_of("llama"), tokenizer(), record)
    (run / "checkpoints" / "best").symlink_to("step_000004")
    groups = [ask("so", "no")]
    expected = classifier(template="{prompt}>{completion}", max_tokens=40)
    texts = [expected.wording.encode("How many?", answer) for answer in ("so", "no")]
    raw = expected.score_all([text.token_ids for text in texts if text is not None])

    assert load(run).score(groups).scores[0] == pytest.approx(raw, abs=1e-5)
    checkpoint = load(run / "checkpoints" / "step_000004", normalization="standardize")
    assert checkpoint.score(groups).scores[0] == pytest.approx([(r - 1) / 2 for r in raw], abs=1e-5)
    given = load(run, normalization="standardize", mean=3.0, std=0.5)
    assert given.score(groups).scores[0] == pytest.approx([(r - 3) / 0.5 for r in raw], abs=1e-5)
    assert load(run, template="plain").classifier.wording.template == PLAIN
    file = tmp_path / "own.txt"
    file.write_text("{completion} to {prompt}\n")
    assert load(run, template=str(file)).classifier.wording.template == "{completion} to {prompt}"


def test_the_shortest_of_all_limits_holds(tmp_path: Path) -> None:
    model, made = model_of("llama"), tokenizer()
    limits = {"where": "r", "template": "plain"}
    assert make_wording(model, made, None, max_tokens=None, **limits).max_tokens == 64
    made.model_max_length = 30
    assert make_wording(model, made, None, max_tokens=None, **limits).max_tokens == 30
    record = Record(template=PLAIN, max_tokens=20)
    assert make_wording(model, made, record, max_tokens=None, **limits).max_tokens == 20
    assert make_wording(model, made, record, max_tokens=25, **limits).max_tokens == 25
    with pytest.raises(UserError, match=r"r\.max_tokens=31 exceeds the model's context of 30"):
        make_wording(model, made, record, max_tokens=31, **limits)


def test_a_recipes_reward_model_is_a_part_like_any_other(tmp_path: Path, ask: Callable[..., Group]) -> None:
    path = save(tmp_path / "m", model_of("llama"), tokenizer(), Record(template=PLAIN))
    reward = build_reward({"helpful": SequenceClassifierConfig(path=str(path), weight=0.5, device="cpu", clip=(-1, 1))})
    scores = reward([ask("a", "bb")])
    assert scores.total[0] == pytest.approx([0.5 * score for score in scores.parts["helpful"][0] if score is not None])
    assert reward.answer("helpful", ask(" a ").completions[0], ask("a").prompt) == "a"


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gpt2"])
def test_a_saved_tokenizer_comes_back_as_it_was(tmp_path: Path, architecture: str) -> None:
    # AutoTokenizer gives a Qwen2 that model's own word splitting, which knows no single characters.
    made = tokenizer()
    path = save(tmp_path / "m", model_of(architecture), made)
    _, loaded, _ = load_model(str(path), where="r", device=torch.device("cpu"))
    text = "how many\n\nso: {a}"
    assert loaded.encode(text) == made.encode(text)
    assert loaded.eos_token_id == EOS


def test_several_outputs_need_a_label(tmp_path: Path, ask: Callable[..., Group]) -> None:
    model = model_of("llama", num_labels=3)
    path = save(tmp_path / "m", model, tokenizer())
    with pytest.raises(UserError, match=r"3 outputs: set rewards\.helpful\.label"):
        load(path, template="plain")
    with pytest.raises(UserError, match=r"rewards\.helpful\.label=3: the model has outputs 0 to 2"):
        load(path, template="plain", label=3)
    scores = [load(path, template="plain", label=label).score([ask("a")]).scores[0][0] for label in range(3)]
    tokens = torch.tensor([[*tokenizer().encode("How many?\n\na"), EOS]])
    with torch.no_grad():
        assert scores == pytest.approx(model.eval()(tokens).logits[0].tolist(), abs=1e-5)


def test_a_language_model_is_no_reward_model(tmp_path: Path) -> None:
    path = save(tmp_path / "m", AutoModelForCausalLM.from_config(config_of("llama")), tokenizer())
    with pytest.raises(UserError, match=r"rewards\.helpful\.path=.*has no score\.weight: it is not a reward model"):
        load(path, template="plain")


def test_what_does_not_fit_is_one_line_with_the_option(tmp_path: Path) -> None:
    path = save(tmp_path / "m", model_of("llama"), tokenizer())
    bare = tmp_path / "bare.txt"
    bare.write_text("{prompt}")
    for settings, message in (
        ({}, r"rewards\.helpful\.template=auto: this model's tokenizer has no chat template"),
        ({"template": "chat"}, r"rewards\.helpful\.template=chat: this model's tokenizer has no chat template"),
        ({"template": "nowhere.txt"}, r"rewards\.helpful\.template=nowhere\.txt: neither a file"),
        ({"template": str(bare)}, r"bare\.txt: the file must have \{prompt\} once and \{completion\} once"),
        ({"template": "plain", "normalization": "standardize"}, r"normalization=standardize: no mean and std"),
        ({"template": "plain", "max_tokens": 65}, r"rewards\.helpful\.max_tokens=65 exceeds"),
    ):
        with pytest.raises(UserError, match=message):
            load(path, **settings)
    with pytest.raises(UserError, match=r"rewards\.helpful\.path=.*: neither a model's directory nor a run"):
        load(tmp_path)
    with pytest.raises(UserError, match=r"rewards\.helpful\.path=\./gone: no such directory"):
        locate("./gone", where="rewards.helpful.path")
    (path / RECORD).write_text("[]")
    with pytest.raises(UserError, match="not a reward model's record"):
        load(path)


def test_a_hub_name_is_left_to_the_hub() -> None:
    assert locate("owner/name", where="r") == "owner/name"


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    record = Record(template="chat", max_tokens=7, scores=Spread(mean=0.1, std=0.2, count=3))
    record.write(tmp_path)
    assert read_record(tmp_path) == record
    assert json.loads((tmp_path / RECORD).read_text())["scores"] == {"mean": 0.1, "std": 0.2, "count": 3}
    assert read_record(tmp_path / "nowhere") is None
