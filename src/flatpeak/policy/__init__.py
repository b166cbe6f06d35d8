"""The model: loading, attention, token log-probabilities, decoding."""

from typing import TYPE_CHECKING

from flatpeak.utils.lazy_imports import lazy_names

if TYPE_CHECKING:
    from flatpeak.policy.config import ModelConfig as ModelConfig
    from flatpeak.policy.config import ReferenceConfig as ReferenceConfig
    from flatpeak.policy.loading import build_tokenizer as build_tokenizer
    from flatpeak.policy.loading import load_policy as load_policy
    from flatpeak.policy.loading import make_model as make_model
    from flatpeak.policy.model import Policy as Policy

__getattr__ = lazy_names(
    __name__,
    {
        "ModelConfig": "config",
        "Policy": "model",
        "ReferenceConfig": "config",
        "build_tokenizer": "loading",
        "load_policy": "loading",
        "make_model": "loading",
    },
)
