"""The state of torch in a process: what a run expects of it, and gives back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch


@contextmanager
def usual_torch_state() -> Iterator[None]:
    """A context with torch as a fresh process has it, whatever the caller has set; afterwards it is the caller's again.

    New tensors are float32 and on the CPU, gradients are computed, the number of threads may be changed. Autocast casts
    a weight for every use of it: its cache lasts as long as the outermost autocast does, so that around a whole run
    every step would train at the weights of the first.
    """
    dtype, threads, cached = torch.get_default_dtype(), torch.get_num_threads(), torch.is_autocast_cache_enabled()
    torch.set_default_dtype(torch.float32)
    torch.set_autocast_cache_enabled(False)
    torch.clear_autocast_cache()
    try:
        with ExitStack() as held:
            held.enter_context(torch.inference_mode(False))
            held.enter_context(torch.enable_grad())
            if torch.get_default_device().type != "cpu":
                held.enter_context(torch.device("cpu"))
            yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_autocast_cache_enabled(cached)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
