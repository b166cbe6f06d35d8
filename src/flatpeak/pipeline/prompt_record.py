"""The record of a checkpoint in flatpeak.json: how its model was asked, for what task, and by which recipe.

It travels with the checkpoint, so that a copy of it is asked as in training wherever it lies. A copy may come from
anywhere: what is read from it can neither run code, nor name a server, nor open a file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

import flatpeak
from flatpeak.config.run_config import RunConfig
from flatpeak.errors import UserError
from flatpeak.policy.config import ModelConfig
from flatpeak.runs.manifest import flatten
from flatpeak.tasks.prompts import CHAT, PLACEHOLDER, TEXT_TEMPLATES, template_text
from flatpeak.utils.adapter_base import ADAPTER_CONFIG, named_base
from flatpeak.utils.huggingface import is_surely_local
from flatpeak.utils.redaction import redact

PROMPT_RECORD: Final = "flatpeak.json"
"""The file of the record, beside the model's own."""
ModelKind = Literal["policy", "reward_model"]
SAFE_TASKS: Final = frozenset(
    {"arithmetic", "countdown", "gsm8k", "math", "mmlu", "mmlu_pro", "choices", "rows", "camel_ai", "dr_sci"}
)
"""Tasks that read or generate data and run no code of anybody's."""
SAFE_REWARDS: Final = frozenset({"number", "math", "exact", "format", "choice", "length", "countdown"})
"""Rewards that are rules of flatpeak's own: no user's code, no server, no further model."""


class EvaluationSampling(BaseModel):
    """The sampling of the run's evaluations, which `flatpeak chat` answers by."""

    model_config = ConfigDict(frozen=True)

    temperature: float = Field(ge=0)
    top_p: float = Field(gt=0, le=1)
    top_k: int = Field(ge=0)
    max_new_tokens: int = Field(ge=1)


class PromptRecord(BaseModel):
    """The wording, sampling and recipe that a model was trained with; keys of later versions are passed over."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    flatpeak: str
    """The version that wrote it."""
    kind: ModelKind = "policy"
    base_model: str | None = None
    """The Hub name of the model that training began with; null for a new one, or one that the Hub does not have."""
    base_revision: str | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"
    recipe_sha256: str
    """`recipe_hash` of the run's config.yaml."""
    objects: tuple[str, ...] = ()
    """The objects that a Python caller gave in place of what the recipe describes: model, task, reward, sampler, loss,
    advantage."""
    task: str
    template: str | None = None
    """The text around {question}, or `chat`: the tokenizer's chat template. null for a reward model."""
    template_name: str | None = None
    """The template as the recipe names it."""
    system: str | None = None
    user: str = PLACEHOLDER
    """The user's message around {question}, under a chat template."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    stop: tuple[str, ...] = ()
    """Strings that end an answer, beside the tokenizer's end of sequence."""
    sampling: EvaluationSampling | None = None
    evaluation: dict[str, Any] = Field(default_factory=dict)
    """The sections of the recipe that an evaluation needs too: task, rewards, evaluation, and the limits of prompts."""

    def as_text(self) -> str:
        """The contents of the file, without secrets."""
        return json.dumps(redact(self.model_dump(mode="json")), indent=1, ensure_ascii=False) + "\n"

    def with_base_of(self, earlier: PromptRecord | None) -> PromptRecord:
        """The record with the base of an earlier checkpoint of its run, since when a directory may have gone."""
        if earlier is None:
            return self
        return self.model_copy(update={"base_model": earlier.base_model, "base_revision": earlier.base_revision})

    @property
    def recipe_template(self) -> str:
        """The value of `prompt.template` that words a question as recorded."""
        name, text = self.template_name, self.template
        return name if name in TEXT_TEMPLATES and TEXT_TEMPLATES[name] == text else text or CHAT

    @property
    def unsafe(self) -> str | None:
        """The first part of the recorded task and rewards that only its own run may load, such as `task.path=/data`."""
        from_python = [name for name in ("task", "reward") if name in self.objects]
        if from_python:
            return f"a {from_python[0]} from Python"
        for key in ("tools", "environment"):
            if self.evaluation.get(key):
                return f"{key}={self.evaluation[key]}"
        for name, task in _tasks(self.evaluation):
            if _type_of(task) not in SAFE_TASKS:
                return f"{name}.type={_type_of(task)}"
            for key, value in flatten(task, name).items():
                if _is_local(key, value):
                    return f"{key}={value}"
        rewards = self.evaluation.get("rewards")
        types = {name: _type_of(reward) for name, reward in rewards.items()} if isinstance(rewards, Mapping) else {}
        return next((f"rewards.{name}.type={kind}" for name, kind in types.items() if kind not in SAFE_REWARDS), None)

    def recipe(self) -> dict[str, Any]:
        """The sections of a recipe that ask the model as recorded; task and rewards where they run no code."""
        limits = self.evaluation.get("prompt")
        prompt = {**limits} if isinstance(limits, Mapping) else {}
        prompt |= {"template": self.recipe_template, "system": self.system, "user": self.user}
        recipe: dict[str, Any] = {
            "model": {"dtype": self.dtype},
            "prompt": {**prompt, "chat_template_kwargs": self.chat_template_kwargs},
            "rollout": {"stop": self.stop},
        }
        if self.sampling is not None:
            recipe["rollout"]["max_new_tokens"] = self.sampling.max_new_tokens
        recorded = dict(self.evaluation)
        if self.unsafe:
            recorded = {"evaluation": {key: value for key, value in _section(recorded, "evaluation") if key != "sets"}}
        recorded.pop("task" if recorded.get("tasks") else "tasks", None)
        names = ("task", "tasks", "rewards", "evaluation")
        return recipe | {name: recorded[name] for name in names if name in recorded}


def _tasks(recipe: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The sections of a recorded recipe that are tasks, by their keys."""
    tasks = recipe.get("tasks") or []
    if not tasks:
        yield "task", recipe.get("task")
    for index, item in enumerate(tasks if isinstance(tasks, list) else [None]):
        yield f"tasks.{index}.task", item.get("task") if isinstance(item, Mapping) else None
    for name, section in _section(dict(_section(recipe, "evaluation")), "sets"):
        yield f"evaluation.sets.{name}", section


def _section(recipe: Mapping[str, Any], name: str) -> Iterable[tuple[str, Any]]:
    section = recipe.get(name)
    return section.items() if isinstance(section, Mapping) else ()


def _type_of(section: Any) -> str:
    return str(section.get("type")) if isinstance(section, Mapping) else "None"


def _is_local(key: str, value: Any) -> bool:
    """Whether a task's setting names a file or directory, which a data set's name can do too."""
    name = key.rpartition(".")[2]
    if name == "hub" and value:
        return is_surely_local(str(value)) or Path(str(value)).exists()
    return (name == "path" or name.endswith("_path")) and bool(value)


def make_prompt_record(
    config: RunConfig, *, task: str, objects: Sequence[str] = (), kind: ModelKind = "policy"
) -> PromptRecord:
    """The record of a run's checkpoints. `task` is the task's name, `objects` are those that the caller gave."""
    resolved = config.model_dump(mode="json")
    base, revision = (None, None) if "model" in objects else hub_base(config.model)
    common: dict[str, Any] = {
        "flatpeak": flatpeak.__version__,
        "kind": kind,
        "base_model": base,
        "base_revision": revision,
        "dtype": config.model.dtype,
        "recipe_sha256": recipe_hash(resolved),
        "objects": tuple(objects),
        "task": task,
    }
    if kind == "reward_model":  # its wording is in reward_model.json
        return PromptRecord(**common)
    prompt, evaluation, rollout = config.prompt, config.evaluation, config.rollout
    sampling = EvaluationSampling(
        temperature=0.0 if evaluation.greedy else evaluation.temperature,
        top_p=1.0 if evaluation.greedy else evaluation.top_p,
        top_k=0 if evaluation.greedy else evaluation.top_k,
        max_new_tokens=evaluation.max_new_tokens or rollout.max_new_tokens,
    )
    return PromptRecord(
        **common,
        template=CHAT if prompt.template == CHAT else template_text(prompt.template),
        template_name=None if PLACEHOLDER in prompt.template else prompt.template,
        system=prompt.system,
        user=prompt.user,
        chat_template_kwargs=prompt.chat_template_kwargs,
        stop=rollout.stop if evaluation.stop is None else evaluation.stop,
        sampling=sampling,
        evaluation={
            "prompt": {name: resolved["prompt"][name] for name in ("max_tokens", "overlong")},
            **{name: resolved[name] for name in ("task", "tasks", "rewards", "evaluation", "tools", "environment")},
        },
    )


def recipe_hash(resolved: Mapping[str, Any]) -> str:
    """SHA-256 of a recipe as config.yaml has it, wherever the run lies, whatever it is called and who tracks it."""
    recipe = redact(json.loads(json.dumps(resolved)))
    recipe["run"] = {key: value for key, value in recipe["run"].items() if key not in ("name", "directory")}
    recipe.pop("tracking", None)
    return hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()


def hub_base(model: ModelConfig) -> tuple[str | None, str | None]:
    """(name, revision) on the Hub of the model that training began with; (None, None) where it has none."""
    if model.path is None:
        return None, None
    directory = Path(model.path).expanduser()
    if not directory.is_dir():
        return on_hub(model.path, model.revision)
    record = read_prompt_record(directory)
    if record is not None:
        return record.base_model, record.base_revision
    if (directory / ADAPTER_CONFIG).is_file():
        return on_hub(*named_base(directory, where="model.path"))
    return None, None


def on_hub(path: str, revision: str | None) -> tuple[str | None, str | None]:
    """(repository, revision) of a model, which may be a GGUF file; (None, None) for one that is only here."""
    if is_surely_local(path) or Path(path).expanduser().exists():
        return None, None
    return "/".join(path.split("/")[:2]), revision


def read_prompt_record(directory: Path) -> PromptRecord | None:
    """The record in a model's directory; None where there is none. UserError for one that is damaged."""
    path = directory / PROMPT_RECORD
    if not path.is_file():
        return None
    try:
        record = PromptRecord.model_validate_json(path.read_bytes())
    except (ValidationError, OSError) as error:
        problem = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error.strerror
        raise UserError(f"{path}: not the record of a checkpoint ({problem}); copy it again, or remove it") from error
    template = record.user if record.template == CHAT else record.template
    if template is not None and PLACEHOLDER not in template:
        raise UserError(f"{path}: its template has no {PLACEHOLDER}; copy it again, or remove it")
    return record
