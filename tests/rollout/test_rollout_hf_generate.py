from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Qwen2Config, Qwen2ForCausalLM

from flatpeak.errors import UserError
from flatpeak.rollout.hf_generate import GenerateEngine
from flatpeak.types import Completion, SamplingParams
from support.fake_decoders import NumberTokenizer, byte_level_tokenizer, make_prompt

VOCABULARY = 24
PROMPTS = [make_prompt(f"p{n}", range(3, 5 + 2 * n)) for n in range(3)]


def tiny_model(kind: str):
    torch.manual_seed(0)
    if kind == "gpt2":
        config = GPT2Config(
            vocab_size=VOCABULARY, n_positions=64, n_embd=16, n_layer=2, n_head=2, initializer_range=0.5
        )
        return GPT2LMHeadModel(config)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        initializer_range=0.5,
        tie_word_embeddings=False,
    )
    return Qwen2ForCausalLM(config)


@pytest.fixture(scope="module", params=["gpt2", "qwen2"])
def model(request):
    return tiny_model(request.param)


def generate(model, prompts=PROMPTS, *, eos=(0,), group_size=4, seed=5, max_rows=512, tokenizer=None, **settings):
    tokenizer = tokenizer or NumberTokenizer(special=eos)
    engine = GenerateEngine(model, tokenizer, eos_token_ids=frozenset(eos), max_rows=max_rows)
    sampling = SamplingParams(**{"max_new_tokens": 12, **settings})
    groups = engine.generate(prompts, group_size=group_size, sampling=sampling, seed=seed)
    return {group.prompt.id: group.completions for group in groups}


@torch.no_grad()
def logits_by_forward(model, prompt, completion: Completion) -> torch.Tensor:
    ids = torch.tensor([[*prompt.token_ids, *completion.token_ids]])
    first = len(prompt.token_ids) - 1
    return model.eval()(input_ids=ids).logits[0, first : first + len(completion.token_ids)].double()


def scripted_model(following: dict[int, int], vocabulary: int = VOCABULARY):
    """A GPT-2 that says following[token] after each token, whatever came before."""
    config = GPT2Config(
        vocab_size=vocabulary, n_positions=64, n_embd=vocabulary, n_layer=1, n_head=1, tie_word_embeddings=False
    )
    model = GPT2LMHeadModel(config)
    embedding = torch.eye(vocabulary)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.transformer.ln_f.weight.fill_(1.0)
        model.transformer.wte.weight.copy_(embedding)
        for token, after in following.items():
            model.lm_head.weight[after] += 30 * embedding[token]
    return model


def test_greedy_tokens_are_those_of_a_loop_of_forward_passes(model) -> None:
    completions = generate(model, temperature=0.0, group_size=1)
    for prompt in PROMPTS:
        history = list(prompt.token_ids)
        with torch.no_grad():
            for _ in range(12):
                logits_V = model.eval()(input_ids=torch.tensor([history])).logits[0, -1]
                history.append(int(logits_V.argmax()))
                if history[-1] == 0:
                    break
        assert completions[prompt.id][0].token_ids == tuple(history[len(prompt.token_ids) :])


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_logprobs_are_those_of_a_forward_pass_at_the_temperature(model, temperature: float) -> None:
    completions = generate(model, temperature=temperature, top_k=10)
    for prompt in PROMPTS:
        for completion in completions[prompt.id]:
            logprobs_TV = torch.log_softmax(logits_by_forward(model, prompt, completion) / temperature, -1)
            exact = logprobs_TV[torch.arange(len(completion.token_ids)), list(completion.token_ids)]
            np.testing.assert_allclose(completion.logprobs, exact, atol=1e-5, rtol=0)
            top_TK, ids_TK = logprobs_TV.topk(10)
            inside = (ids_TK == torch.tensor(completion.token_ids)[:, None]).any(-1)
            assert inside.all()
            np.testing.assert_allclose(completion.filtered_logprobs, exact - top_TK.logsumexp(-1), atol=1e-5, rtol=0)


def test_sampled_first_tokens_follow_the_exact_distribution(model) -> None:
    completions = generate(model, PROMPTS[1:2], group_size=4000, max_rows=1000, max_new_tokens=1)["p1"]
    counts = np.bincount([completion.token_ids[0] for completion in completions], minlength=VOCABULARY)
    expected = 4000 * torch.softmax(logits_by_forward(model, PROMPTS[1], completions[0])[0], -1).numpy()
    common = expected >= 5
    chi_square = ((counts - expected)[common] ** 2 / expected[common]).sum()
    assert chi_square < common.sum() + 4 * np.sqrt(2 * common.sum())


def test_left_padding_company_and_chunks_do_not_change_what_is_drawn(model) -> None:
    together = generate(model)
    for max_rows in (1, 3, 4, 8):
        for prompt_id, completions in generate(model, PROMPTS[::-1], max_rows=max_rows).items():
            for completion, expected in zip(completions, together[prompt_id], strict=True):
                assert completion.token_ids == expected.token_ids
                np.testing.assert_allclose(completion.logprobs, expected.logprobs, atol=2e-5)


@pytest.mark.parametrize("pad", [None, 0, 23])
@pytest.mark.parametrize("eos", [(0,), (0, 9)])
def test_the_first_end_of_sequence_token_is_kept_and_nothing_after_it(pad: int | None, eos: tuple[int, ...]) -> None:
    # 5 -> 6 -> 0 and then 7, whatever the model's config and tokenizer call padding.
    model = scripted_model({4: 5, 5: 6, 6: 0, 0: 7, 7: 7, 8: 8})
    model.config.pad_token_id = model.generation_config.pad_token_id = pad
    tokenizer = NumberTokenizer(special=eos)
    tokenizer.pad_token_id = pad
    prompts = [make_prompt("short", [4]), make_prompt("endless", [3, 3, 8])]
    completions = generate(model, prompts, eos=eos, tokenizer=tokenizer, temperature=0.0, max_new_tokens=6)
    for completion in completions["short"]:
        assert completion.token_ids == (5, 6, 0)
        assert len(completion.logprobs) == 3
        assert (completion.finish_reason, completion.text) == ("stop", "<5><6>")
    assert completions["endless"][0].token_ids == (8,) * 6
    assert completions["endless"][0].finish_reason == "length"


@pytest.mark.parametrize(("limit", "reason"), [(1, "length"), (2, "length"), (3, "stop")])
def test_the_last_allowed_token_tells_stop_from_length(limit: int, reason: str) -> None:
    model = scripted_model({4: 5, 5: 6, 6: 0})
    completion = generate(model, [make_prompt("p", [4])], temperature=0.0, max_new_tokens=limit)["p"][0]
    assert completion.token_ids == (5, 6, 0)[:limit]
    assert completion.finish_reason == reason


def test_another_end_of_sequence_token_as_the_first() -> None:
    completion = generate(scripted_model({4: 9}), [make_prompt("p", [4])], eos=(0, 9), temperature=0.0)["p"][0]
    assert completion.token_ids == (9,)
    assert (completion.finish_reason, completion.text) == ("stop", "")


def test_min_new_tokens_holds_back_both_ends() -> None:
    model = scripted_model({4: 5, 5: 6, 6: 5})
    prompts = [make_prompt("p", [4])]
    assert generate(model, prompts, temperature=0.0, stop=("<6>",))["p"][0].token_ids == (5, 6)
    later = generate(model, prompts, temperature=0.0, stop=("<6>",), min_new_tokens=3)["p"][0]
    assert later.token_ids == (5, 6, 5, 6)
    for completion in generate(tiny_model("qwen2"), eos=tuple(range(12)), min_new_tokens=4)["p1"]:
        assert min(completion.token_ids[:4]) >= 12


def test_a_stop_string_of_several_tokens_ends_a_completion_and_is_kept() -> None:
    tokenizer = byte_level_tokenizer()
    text = tokenizer.encode("n</ans>b", add_special_tokens=False)
    model = scripted_model(dict(pairwise(text)), len(tokenizer))
    prompt = make_prompt("p", text[:1])
    completion = generate(model, [prompt], tokenizer=tokenizer, temperature=0.0, stop=("</ans>",))["p"][0]
    assert completion.text == "</ans>"
    assert completion.token_ids == tuple(text[1:-1])
    assert len(completion.token_ids) == 3
    assert completion.finish_reason == "stop"


def test_the_models_own_generation_settings_have_no_say(model) -> None:
    expected = generate(model), generate(model, temperature=0.0)
    own = model.generation_config
    own_values = {
        "temperature": 0.01,
        "top_p": 0.1,
        "top_k": 1,
        "do_sample": True,
        "repetition_penalty": 5.0,
        "no_repeat_ngram_size": 1,
        "suppress_tokens": list(range(3, VOCABULARY)),
        "forced_eos_token_id": 2,
        "eos_token_id": list(range(3, VOCABULARY)),
        "min_new_tokens": 3,
        "max_length": 3,
        "num_beams": 2,
        "num_return_sequences": 2,
    }
    before = {key: getattr(own, key) for key in own_values}
    own.update(**own_values)
    try:
        assert (generate(model), generate(model, temperature=0.0)) == expected
        assert model.generation_config is own
        assert {key: getattr(own, key) for key in own_values} == own_values
    finally:
        own.update(**before)


def test_training_mode_caching_and_random_state_come_back_as_they_were(model) -> None:
    expected = generate(model)
    model.train()
    model.config.use_cache = False
    modules = list(model.modules())
    modules[3].eval()
    modes = [module.training for module in modules]
    torch.manual_seed(9)
    before = torch.random.get_rng_state()
    try:
        assert generate(model) == expected  # dropout is off while sampling
        assert [module.training for module in modules] == modes
        assert torch.equal(torch.random.get_rng_state(), before)
        with pytest.raises(UserError, match="at least 1"):
            generate(model, max_new_tokens=0)
        assert [module.training for module in modules] == modes
    finally:
        model.eval()
        model.config.use_cache = True


def test_logprobs_can_be_used_in_training_afterwards(model) -> None:
    generate(model)
    loss = model(input_ids=torch.tensor([[3, 4, 5]])).logits.logsumexp(-1).sum()
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    model.zero_grad()


def test_a_peft_model_samples_with_its_adapter() -> None:
    peft = pytest.importorskip("peft")
    base = tiny_model("qwen2")
    without = generate(base, temperature=0.0)
    adapted = peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.mul_(20)
    completions = generate(adapted, temperature=0.0)
    assert completions != without
    for prompt in PROMPTS:
        logits_TV = logits_by_forward(adapted, prompt, completions[prompt.id][0])
        assert completions[prompt.id][0].token_ids == tuple(logits_TV.argmax(-1).tolist())


def test_nothing_is_printed_or_warned(model, capfd, recwarn) -> None:
    generate(model)
    assert capfd.readouterr() == ("", "")
    assert [str(warning.message) for warning in recwarn.list] == []
