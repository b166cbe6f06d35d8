"""Worker of `engine`: samples with flatpeak, transformers' generate, or its continuous batching."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from transformers import GenerationConfig

from benchmarks.harness.models import load_model, load_tokenizer
from benchmarks.harness.worker_process import Meter, ParentPipe
from benchmarks.harness.workloads import Workload, continuous_batching, prompt_ids
from flatpeak.policy.model import Policy
from flatpeak.rollout.engine import NativeEngine
from flatpeak.types import Example, Prompt, SamplingParams

Draw = Callable[[list[list[int]], int], list[list[int]]]
"""From prompts and a seed to `group` completions per prompt."""
Facts = dict[str, str]
"""Properties that a contender reports."""


def main() -> None:
    """Load, report, and sample in turns."""
    parent, meter = ParentPipe(), Meter()
    arguments = json.loads(sys.argv[1])
    work = Workload(**arguments["workload"])
    torch.set_num_threads(arguments["threads"])
    model, tokenizer = load_model(arguments["model"]).eval(), load_tokenizer(arguments["model"])
    meter.loaded()
    draw, facts = DRAWS[arguments["contender"]](model, tokenizer, work)
    parent.send(parameters=sum(parameter.numel() for parameter in model.parameters()), **facts)
    while True:
        step = parent.receive()["round"]
        prompts = prompt_ids(work, step)
        meter.start()
        completions = draw(prompts, step)
        spent = meter.stop()
        parent.send(tokens=sum(map(work.useful_tokens, completions)), **spent)


def flatpeak_draw(model: Any, tokenizer: Any, work: Workload) -> tuple[Draw, Facts]:
    """Sample with log-probabilities and text, as training needs them, with weights packed in every round."""
    policy = Policy(model, tokenizer)
    engine = NativeEngine(policy, max_rows=work.prompts * work.group)
    sampling = SamplingParams(max_new_tokens=work.limits.cap)

    def draw(prompts: list[list[int]], seed: int) -> list[list[int]]:
        asked = [
            Prompt(id=str(index), token_ids=tuple(ids), text="", example=Example(id=str(index), question="", gold=""))
            for index, ids in enumerate(prompts)
        ]
        policy.kernels.release()
        groups = engine.generate(asked, group_size=work.group, sampling=sampling, seed=seed)
        return [list(completion.token_ids) for group in groups for completion in group.completions]

    return draw, {"decoder": policy.decoded_with or ""}


def generate_draw(model: Any, tokenizer: Any, work: Workload) -> tuple[Draw, Facts]:
    """Sample one left-padded batch of all rows, without log-probabilities."""
    config = generation_config(work)

    def draw(prompts: list[list[int]], seed: int) -> list[list[int]]:
        torch.manual_seed(seed)
        longest = max(map(len, prompts))
        rows = [ids for ids in prompts for _ in range(work.group)]
        ids_NL = torch.tensor([[work.pad] * (longest - len(ids)) + ids for ids in rows])
        mask_NL = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in rows])
        with torch.no_grad():
            ids = model.generate(input_ids=ids_NL, attention_mask=mask_NL, generation_config=config)
        return ids[:, longest:].tolist()  # type: ignore[no-any-return]

    return draw, {}


def generate_batch_draw(model: Any, tokenizer: Any, work: Workload) -> tuple[Draw, Facts]:
    """Sample by continuous batching, with a cache that fits the workload, without log-probabilities."""
    from transformers.generation import ContinuousBatchingConfig

    config = generation_config(work)
    batching = ContinuousBatchingConfig(**continuous_batching(work))

    def draw(prompts: list[list[int]], seed: int) -> list[list[int]]:
        torch.manual_seed(seed)
        rows = [ids for ids in prompts for _ in range(work.group)]
        with torch.no_grad():
            outputs = model.generate_batch(
                rows, generation_config=config, continuous_batching_config=batching, progress_bar=False
            )
        return [output.generated_tokens for output in outputs.values()]

    return draw, {}


def generation_config(work: Workload) -> GenerationConfig:
    """Plain sampling at temperature 1 from the whole vocabulary."""
    return GenerationConfig(
        max_new_tokens=work.limits.cap,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        eos_token_id=work.eos,
        pad_token_id=work.pad,
        use_cache=True,
    )


DRAWS: dict[str, Callable[[Any, Any, Workload], tuple[Draw, Facts]]] = {
    "flatpeak": flatpeak_draw,
    "transformers generate": generate_draw,
    "transformers generate_batch": generate_batch_draw,
}

if __name__ == "__main__":
    main()
