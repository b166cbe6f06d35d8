"""vLLM servers as a sampler: they sample completions over HTTP with weights that follow the trainer's."""

from typing import TYPE_CHECKING

from flatpeak.utils.lazy_imports import lazy_names

if TYPE_CHECKING:
    from flatpeak.rollout.vllm.sampler import VLLMSampler as VLLMSampler

__getattr__ = lazy_names(__name__, {"VLLMSampler": "sampler"})
