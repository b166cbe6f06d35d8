"""Worker of `engine`: samples with vLLM, in a Python without flatpeak."""

from __future__ import annotations

import json
import sys

import torch
import vllm
from vllm import LLM, SamplingParams

from benchmarks.harness.worker_process import Meter, ParentPipe
from benchmarks.harness.workloads import Workload, prompt_ids


def main() -> None:
    """Load, report, and sample in turns."""
    parent, meter = ParentPipe(), Meter()
    arguments = json.loads(sys.argv[1])
    work = Workload(**arguments["workload"])
    torch.set_num_threads(arguments["threads"])
    engine = LLM(
        model=arguments["model"],
        dtype=arguments["dtype"],
        max_model_len=work.limits.longest_prompt + work.limits.cap,
        max_num_seqs=work.prompts * work.group,
        enable_prefix_caching=True,
        enforce_eager=arguments["eager"],
        disable_log_stats=True,
        seed=0,
    )
    meter.loaded()
    parent.send(vllm=vllm.__version__, torch=torch.__version__, threads=torch.get_num_threads())
    while True:
        step = parent.receive()["round"]
        # Weights change between training steps, so a cache of their results is useless in the next step.
        engine.reset_prefix_cache()
        asked = [{"prompt_token_ids": ids} for ids in prompt_ids(work, step)]
        # The log-probability of the sampled token, and no text, which vLLM would decode token by token. On a CPU vLLM
        # does not support a seed per request, so the engine's seed is used.
        sampling = SamplingParams(
            n=work.group, temperature=1.0, max_tokens=work.limits.cap, logprobs=0, detokenize=False
        )
        meter.start()
        outputs = engine.generate(asked, sampling, use_tqdm=False)
        spent = meter.stop()
        completions = [list(output.token_ids) for request in outputs for output in request.outputs]
        parent.send(tokens=sum(map(work.useful_tokens, completions)), **spent)


if __name__ == "__main__":
    main()
