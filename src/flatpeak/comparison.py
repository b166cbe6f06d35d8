"""`flatpeak eval`: load models one after another and evaluate each on the same questions."""

from __future__ import annotations

from collections.abc import Sequence

from flatpeak.api import Silence
from flatpeak.assembly import Given, build_evaluation
from flatpeak.errors import UserError
from flatpeak.evaluation.compare import Comparison
from flatpeak.evaluation.locate import locate_model
from flatpeak.protocols import Progress
from flatpeak.recipe import apply_overrides, load_recipe, parse_config


def compare_checkpoints(
    names: Sequence[str], overrides: Sequence[str] = (), *, progress: Progress | None = None
) -> Comparison:
    """Evaluate runs, checkpoints or Hub names on the held-out set of the first one's recipe, as overridden.

    Raises UserError where nothing says what to evaluate on.
    """
    located = [locate_model(name) for name in names]
    recipe = next((found.recipe for found in located if found.recipe is not None), None)
    base = load_recipe(recipe) if recipe is not None else {}
    if recipe is None and not any(override.split("=")[0].startswith("task") for override in overrides):
        raise UserError("none of these models belongs to a run, so the task is unknown: give --recipe or task.type=...")
    evaluations = []
    for found in located:
        model = {"path": found.path, "device": base.get("model", {}).get("device", "auto")}
        config = parse_config(apply_overrides({**base, "model": model}, overrides))
        evaluate, prompts = build_evaluation(config, Given(), progress=progress or Silence())
        evaluations.append(evaluate(prompts[: config.evaluation.final_size or config.evaluation.size]))
    return Comparison(labels=[_label(name) for name in names], evaluations=evaluations)


def _label(name: str) -> str:
    return "/".join(part for part in name.rstrip("/").split("/") if part != "checkpoints")[-40:]
