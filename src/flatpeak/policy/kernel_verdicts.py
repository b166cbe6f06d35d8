"""Passed self-tests in the user's cache, so that the next run does not repeat them.

Whether a test passes depends on the kernels and the shape of the model. Kernels and torch compute the same sums in
different orders: they differ by rounding, or by a bug, which shows with any weights. A failure may be due to the
weights alone (the gradients of a diverged run are mostly rounding), so failed tests are repeated at every start. Every
request checks for hooks and unsupported modules. A model with weights that are not finite is tested again, because the
test rejects it.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
import transformers

from flatpeak.kernels.matmul import onednn_is_faster
from flatpeak.kernels.native.build import UnavailableError, cache_folder
from flatpeak.kernels.processor import kind
from flatpeak.policy.compatibility import PolicyParts
from flatpeak.policy.linears import plain_class

PACKAGE = Path(__file__).parents[1]
FOLDERS = ("kernels", "policy", "functional", "rollout")
"""The folders of the package whose source affects a verdict."""
PASSED = "passed"


def remembered(test: str, policy: PolicyParts, decide: Callable[[], bool]) -> bool:
    """Whether a policy's model passes a test, from the cache if it has passed before, else from `decide`.

    `test` identifies the test and everything that affects its verdict apart from model, machine and program.
    """
    path = _path(test, policy)
    if path is not None and _is_finite(policy):
        with suppress(OSError, UnicodeDecodeError):
            if path.read_text(encoding="utf-8") == PASSED:
                return True
    passed = decide()
    if passed and path is not None:
        with suppress(OSError):
            path.write_text(PASSED, encoding="utf-8")
    return passed


def _path(test: str, policy: PolicyParts) -> Path | None:
    """The file of a verdict; None on a GPU, where tests must load the kernels, and without a private folder."""
    if policy.device.type != "cpu":
        return None
    try:
        folder = cache_folder()
    except UnavailableError:
        return None
    versions = [torch.__version__, transformers.__version__, platform.python_version()]
    processor = [platform.machine(), kind(), torch.backends.cpu.get_cpu_capability()]
    machine = [versions, processor, torch.get_num_threads(), onednn_is_faster()]
    facts = [test, _model(policy), machine, _sources()]
    digest = blake2b(json.dumps(facts, sort_keys=True, default=str).encode(), digest_size=16)
    return folder / f"verdict-{digest.hexdigest()}"


def _model(policy: PolicyParts) -> list[Any]:
    config = policy.causal.config.to_dict()
    config.pop("_name_or_path", None)
    modules = [(name, str(plain_class(module))) for name, module in policy.model.named_modules()]
    weights = [(str(each.shape), str(each.dtype), each.requires_grad) for each in policy.model.parameters()]
    return [config, modules, weights]


@cache
def _sources() -> str:
    digest = blake2b(digest_size=16)
    for path in sorted(file for folder in FOLDERS for file in (PACKAGE / folder).rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _is_finite(policy: PolicyParts) -> bool:
    """Whether all weights are finite; their sum is finite only then."""
    return all(bool(weight.detach().sum().isfinite()) for weight in policy.model.parameters())
