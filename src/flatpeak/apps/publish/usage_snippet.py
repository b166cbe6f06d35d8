"""The part of a model card that says how to ask the model: its wording, its sampling, and Python that runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from flatpeak.config.run_config import RunConfig
from flatpeak.pipeline.prompt_record import PromptRecord
from flatpeak.rewards.sequence_classifier import COMPLETION, PROMPT, Record
from flatpeak.tasks.arithmetic import ArithmeticConfig
from flatpeak.tasks.prompts import CHAT, PLACEHOLDER
from flatpeak.utils.huggingface import is_self_contained

QUESTION: Final = "What is 12 + 30?"
"""The question of the snippet where the task's own are not at hand."""
_LINE: Final = 100
"""Characters of a text in one line of the snippet."""


def fenced(text: str, language: str = "") -> str:
    """A fenced block whose fence is longer than any run of backticks in the text."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}\n{fence}"


def code_span(text: object) -> str:
    """An inline code span of any text, in one line."""
    line = " ".join(str(text).split())
    longest = max((len(run) for run in re.findall(r"`+", line)), default=0)
    ticks = "`" * (longest + 1)
    pad = " " if line.startswith("`") or line.endswith("`") else ""
    return f"{ticks}{pad}{line}{pad}{ticks}" if line else "(empty)"


def describe_asking(record: PromptRecord, config: RunConfig) -> list[str]:
    """The lines about wording and sampling of a policy."""
    lines = []
    if record.template == CHAT:
        lines.append("The tokenizer's chat template words a question, as the user's message.")
        if record.user != PLACEHOLDER:
            lines.append(
                f"The question replaces {code_span(PLACEHOLDER)} in that message:\n\n{fenced(record.user, 'text')}"
            )
        if record.chat_template_kwargs:
            arguments = ", ".join(f"{code_span(k)}: {code_span(v)}" for k, v in record.chat_template_kwargs.items())
            lines.append(f"Arguments of the chat template: {arguments}.")
    else:
        lines.append(f"A question replaces {code_span(PLACEHOLDER)} in this template:")
        lines.append(fenced(record.template or PLACEHOLDER, "text"))
    lines.append(
        "System prompt: none." if record.system is None else f"System prompt:\n\n{fenced(record.system, 'text')}"
    )
    if record.stop:
        lines.append(f"An answer ends at the end of sequence, or with one of {', '.join(map(code_span, record.stop))}.")
    else:
        lines.append("An answer ends at the end of sequence; there are no stop strings.")
    sampling = record.sampling
    if sampling is not None:
        greedy = "greedy" if sampling.temperature == 0 else f"temperature {sampling.temperature:g}"
        lines.append(f"Evaluated answers were {greedy}, of at most {sampling.max_new_tokens} tokens.")
    shots = 0 if "task" in record.objects else getattr(config.task, "shots", 0)
    if shots:
        lines.append(f"In training and evaluation {shots} worked examples stood before each question.")
    return lines


def policy_snippet(repo: str, record: PromptRecord, config: RunConfig, directory: Path, *, adapter: bool) -> str:
    """Python that asks a policy a question as in training; `directory` holds the files that `repo` will have."""
    lines = [*_loading_lines(repo, config, directory, adapter=adapter), "", f"question = {_question(record, config)!r}"]
    lines += _prompt_lines(record)
    sampling = record.sampling
    limit = sampling.max_new_tokens if sampling is not None else config.rollout.max_new_tokens
    draw = "do_sample=False"
    if sampling is not None and sampling.temperature > 0:
        draw = f"do_sample=True, temperature={sampling.temperature!r}, top_p={sampling.top_p!r}, top_k={sampling.top_k}"
    lines += [
        "output = model.generate(",
        "    input_ids=inputs.input_ids,",
        "    attention_mask=inputs.attention_mask,",
        f"    max_new_tokens={limit}, {draw},",
        ")",
        "answer = tokenizer.decode(output[0, inputs.input_ids.shape[1] :], skip_special_tokens=True)",
    ]
    if record.stop:  # `stop_strings` of `generate` fails with some tokenizers of single characters
        lines += [
            f"for stop in {list(record.stop)!r}:",
            "    before, end, _ = answer.partition(stop)",
            "    answer = before + end",
        ]
    return "\n".join([*lines, "print(answer)"])


def reward_model_snippet(repo: str, record: Record, directory: Path) -> str:
    """Python that scores an answer, worded as the pairs were that the model has learned from."""
    tokenizer = "PreTrainedTokenizerFast" if is_self_contained(str(directory)) else "AutoTokenizer"
    lines = [
        "import torch",
        f"from transformers import AutoModelForSequenceClassification, {tokenizer}",
        "",
        f"name = {repo!r}",
        f"tokenizer = {tokenizer}.from_pretrained(name)",
        "model = AutoModelForSequenceClassification.from_pretrained(name, num_labels=1)",
        "model.config.pad_token_id = None  # a text by itself: the score is that of its last token",
        "",
        f'prompt, completion = {QUESTION!r}, "42"',
    ]
    if record.template == CHAT:
        lines += [
            'messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]',
            "text = tokenizer.apply_chat_template(messages, tokenize=False)",
            "ids = tokenizer.encode(text, add_special_tokens=False)",
        ]
    else:
        lines += [
            *_text_lines("template", record.template),
            f"text = template.replace({PROMPT!r}, prompt).replace({COMPLETION!r}, completion)",
            "ids = tokenizer.encode(text)",
            "ids += [] if ids[-1:] == [tokenizer.eos_token_id] else [tokenizer.eos_token_id]",
        ]
    lines += ["with torch.no_grad():", "    print(model(input_ids=torch.tensor([ids])).logits[0, 0].item())"]
    return "\n".join(lines)


def _loading_lines(repo: str, config: RunConfig, directory: Path, *, adapter: bool) -> list[str]:
    """The lines that make `tokenizer` and `model`, without the sampling settings that were saved with the model."""
    tokenizer = "PreTrainedTokenizerFast" if is_self_contained(str(directory)) else "AutoTokenizer"
    quantized = config.model.quantization == "nf4" and adapter
    loader = "AutoPeftModelForCausalLM" if adapter else "AutoModelForCausalLM"
    names = [tokenizer, "GenerationConfig", *([] if adapter else [loader]), *(["BitsAndBytesConfig"] * quantized)]
    imports = [*(["import torch"] * quantized), *([f"from peft import {loader}"] * adapter)]
    imports.append(f"from transformers import {', '.join(sorted(names))}")
    trusted = ", trust_remote_code=True" if config.model.trust_remote_code else ""
    arguments = f"name{trusted}"
    lines = [*imports, "", f"name = {repo!r}", f"tokenizer = {tokenizer}.from_pretrained(name{trusted})"]
    if quantized:
        lines += _quantization(config.model.dtype)
        arguments += ", quantization_config=quantization"
    elif adapter:
        arguments += f", dtype={config.model.dtype!r}"
    return [
        *lines,
        f"model = {loader}.from_pretrained({arguments})",
        "own = model.generation_config  # its sampling and penalties were not those of training",
        "model.generation_config = GenerationConfig(eos_token_id=own.eos_token_id, pad_token_id=own.pad_token_id)",
    ]


def _quantization(dtype: str) -> list[str]:
    return [
        "quantization = BitsAndBytesConfig(",
        '    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,',
        f"    bnb_4bit_compute_dtype=torch.{dtype},",
        ")",
    ]


def _prompt_lines(record: PromptRecord) -> list[str]:
    """The lines that make `inputs` of `question`."""
    if record.template != CHAT:
        return [
            *_text_lines("template", record.template or PLACEHOLDER),
            f'inputs = tokenizer(template.replace({PLACEHOLDER!r}, question), return_tensors="pt")',
        ]
    system = (
        [] if record.system is None else [f'messages.insert(0, {{"role": "system", "content": {record.system!r}}})']
    )
    message = ['messages = [{"role": "user", "content": question}]']
    if record.user != PLACEHOLDER:
        content = f"user.replace({PLACEHOLDER!r}, question)"
        message = [*_text_lines("user", record.user), f'messages = [{{"role": "user", "content": {content}}}]']
    arguments = f", **{record.chat_template_kwargs!r}" if record.chat_template_kwargs else ""
    return [
        *message,
        *system,
        f"text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True{arguments})",
        'inputs = tokenizer(text, add_special_tokens=False, return_tensors="pt")',
    ]


def _text_lines(name: str, text: str) -> list[str]:
    """An assignment of a text, over several lines where it is long."""
    if len(text) <= _LINE:
        return [f"{name} = {text!r}"]
    pieces = [
        line[start : start + _LINE] for line in text.splitlines(keepends=True) for start in range(0, len(line), _LINE)
    ]
    return [f"{name} = (", *(f"    {piece!r}" for piece in pieces), ")"]


def _question(record: PromptRecord, config: RunConfig) -> str:
    """A held-out question of a generated task, else one that any model takes."""
    if isinstance(config.task, ArithmeticConfig) and "task" not in record.objects:
        return config.task.load().test[0].question
    return QUESTION
