"""Memory that log-probabilities keep for the backward pass, and their peak: three ways, each in its own process.

    python studies/claims/memory.py > docs/results/claims/memory.csv

2,048 tokens of width 128 and a vocabulary of 50,257 in float32: one tensor of logits is 393 MiB. "kept" are the bytes
of the tensors that the graph saves, "peak" is the process's highest resident memory in forward and backward above that
before. Inputs and their gradients are left out.
"""

from __future__ import annotations

import csv
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from flatpeak.functional import token_logprobs
from flatpeak.utils.peak_memory import ProcessPeak

TOKENS, WIDTH, VOCABULARY, SEEDS = 2048, 128, 50257, range(3)
MIB = 2**20


def by_log_softmax(hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor) -> Tensor:
    """log_softmax over the whole vocabulary, then the targets' entries."""
    return (hidden_TD @ weight_VD.T).log_softmax(-1).gather(-1, targets_T[:, None])[:, 0]


def by_cross_entropy(hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor) -> Tensor:
    """torch's cross_entropy of the whole logits."""
    return -torch.nn.functional.cross_entropy(hidden_TD @ weight_VD.T, targets_T, reduction="none")


def by_chunks(hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor) -> Tensor:
    """Chunks of logits, by flatpeak."""
    return token_logprobs(hidden_TD, weight_VD, targets_T)[0]


WAYS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "log_softmax": by_log_softmax,
    "cross_entropy": by_cross_entropy,
    "token_logprobs": by_chunks,
}


def measure(way: str, seed: int) -> list[object]:
    """MiB kept and at the peak, and CPU-seconds, of one forward and backward pass."""
    torch.manual_seed(seed)
    hidden_TD = torch.randn(TOKENS, WIDTH, requires_grad=True)
    weight_VD = (torch.randn(VOCABULARY, WIDTH) / WIDTH**0.5).requires_grad_()
    targets_T = torch.randint(VOCABULARY, (TOKENS,))
    # What a first use allocates, and the gradients, are not of the pass that is measured.
    torch.autograd.backward(WAYS[way](hidden_TD[:1], weight_VD, targets_T[:1]).sum())
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in (hidden_TD.data_ptr(), weight_VD.data_ptr()):
            saved[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    peak = ProcessPeak()
    assert peak.reset(), "this system cannot reset the peak of a process"
    before, start = peak.read(), time.process_time()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        logprobs_T = WAYS[way](hidden_TD, weight_VD, targets_T)
    kept = sum(saved.values())
    torch.autograd.backward(logprobs_T.sum())
    seconds = time.process_time() - start
    return [way, seed, f"{kept / MIB:.1f}", f"{(peak.read() - before) / MIB:.1f}", f"{seconds:.2f}"]


def main() -> None:
    """Write a row per way and seed, each measured by a child process."""
    if len(sys.argv) == 3:
        csv.writer(sys.stdout, lineterminator="\n").writerow(measure(sys.argv[1], int(sys.argv[2])))
        return
    print("way,seed,kept_mib,peak_mib,cpu_seconds", flush=True)
    for seed in SEEDS:
        for way in WAYS:
            subprocess.run([sys.executable, __file__, way, str(seed)], check=True)


if __name__ == "__main__":
    main()
