"""Worker of `engines`: samples with one of flatpeak's engines, after changing the weights in every round."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from benchmarks.cpu.engine import VLLM_ENVIRONMENT
from benchmarks.harness.models import load_model, load_tokenizer
from benchmarks.harness.worker_process import Meter, ParentPipe
from benchmarks.harness.workloads import Workload, prompt_ids
from flatpeak.apps.serve import ServeConfig, ServerProcess
from flatpeak.pipeline.rollout_engines import PlainSampler
from flatpeak.policy.model import Policy
from flatpeak.protocols import Sampler
from flatpeak.rollout.config import VLLMConfig
from flatpeak.rollout.engine import NativeEngine
from flatpeak.rollout.vllm import VLLMSampler
from flatpeak.types import Example, Prompt, SamplingParams

STEP = 1.0001
"""The factor of the weights in every round."""
ENVIRONMENT = {
    **{name: value for name, value in VLLM_ENVIRONMENT.items() if "MULTIPROCESSING" not in name},
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
}


def main() -> None:
    """Load, report, and sample in turns."""
    parent, meter = ParentPipe(), Meter()
    arguments = json.loads(sys.argv[1])
    work = Workload(**arguments["workload"])
    torch.set_num_threads(1)
    model, tokenizer = load_model(arguments["model"]).eval(), load_tokenizer(arguments["model"])
    policy = Policy(model, tokenizer)
    sampling = SamplingParams(max_new_tokens=work.limits.cap)
    resources = ExitStack()
    sampler, update, facts = opened(arguments, policy, work, resources)
    meter.loaded()
    parent.send(**facts)
    while True:
        step = parent.receive(at_end=resources.close)["round"]
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.mul_(STEP)
        meter.start()
        update()
        updated = meter.stop()
        meter.start()
        groups = sampler.generate(prompts_of(work, step), group_size=work.group, sampling=sampling, seed=step)
        spent = meter.stop()
        drawn = [list(completion.token_ids) for group in groups for completion in group.completions]
        tokens = sum(map(work.useful_tokens, drawn))
        parent.send(tokens=tokens, update_cpu=updated["cpu"], update_wall=updated["wall"], **spent)


def opened(
    arguments: dict[str, Any], policy: Policy, work: Workload, resources: ExitStack
) -> tuple[Sampler, Callable[[], object], dict[str, str]]:
    """The engine, a function that gives it the current weights, and its report; `resources` ends a server."""
    rows = work.prompts * work.group
    if arguments["engine"] == "native":
        return NativeEngine(policy, max_rows=rows), lambda: None, {}
    if arguments["engine"] == "generate":
        return PlainSampler(policy, max_rows=rows), lambda: None, {}
    python = Path(arguments["python"])
    config = ServeConfig(
        model=arguments["model"],
        port=0,
        dtype="float32",
        max_model_len=work.limits.longest_prompt + work.limits.cap,
        arguments=("--enforce-eager", f"--max-num-seqs={rows}"),
    )
    server = resources.enter_context(ServerProcess(config, python=python, environment=ENVIRONMENT))
    server.wait_until_healthy(timeout=1800.0)
    sampler = VLLMSampler(policy, VLLMConfig(type="vllm", urls=(server.url,)))
    resources.callback(sampler.close)
    asked = [str(python), "-c", "import vllm; print(vllm.__version__)"]
    version = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split()[-1]
    return sampler, sampler.update, {"vllm": version}


def prompts_of(work: Workload, step: int) -> list[Prompt]:
    """The prompts of a round."""
    return [
        Prompt(id=str(index), token_ids=tuple(ids), text="", example=Example(id=str(index), question="", gold=""))
        for index, ids in enumerate(prompt_ids(work, step))
    ]


if __name__ == "__main__":
    main()
