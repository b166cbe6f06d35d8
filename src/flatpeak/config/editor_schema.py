"""The JSON schema of recipes, by which editors complete keys, show their meaning and mark errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from flatpeak.config.run_config import RunConfig
from flatpeak.config.schema_types import elements, models_of
from flatpeak.config.settings_reference import field_docstrings


def editor_schema() -> str:
    """The schema as JSON. Nothing is required in it, because a recipe may inherit any key from those it extends."""
    schema = RunConfig.model_json_schema()
    models = {model.__name__: model for model in _models(RunConfig)}
    for name, section in {**schema["$defs"], "RunConfig": schema}.items():
        described = field_docstrings(models[name]) if name in models else {}
        for key, property in section.get("properties", {}).items():
            if key in described:
                property["description"] = described[key]
    name = {"type": "string", "description": "A recipe to start from: a file, or flatpeak:NAME. Also a list of them."}
    schema["properties"]["extends"] = {"anyOf": [name, {"type": "array", "items": name}]}
    schema["title"] = "A recipe of flatpeak"
    return json.dumps(_lenient(schema), indent=1, ensure_ascii=False)


def _models(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """A configuration and all those within it."""
    yield model
    for field in model.model_fields.values():
        for annotation in (field.annotation, *(inner for _, inner in elements(field.annotation))):
            for inner in models_of(annotation):
                yield from _models(inner)


def _lenient(schema: Any) -> Any:
    """The schema without required keys; a section without its `type` may be any of its alternatives."""
    if isinstance(schema, list):
        return [_lenient(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    renamed = {"anyOf" if key == "oneOf" else key: value for key, value in schema.items()}
    return {key: _lenient(value) for key, value in renamed.items() if key not in ("required", "discriminator")}
