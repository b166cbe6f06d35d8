"""Finished runs to be pushed, and what is left of them in a folder for the Hub."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

from flatpeak.config.run_config import RunConfig
from support.runs import quick_train, tiny_recipe

STORED_KEY, PRINTED_KEY = "a-key-of-the-recipe", "hf_" + "inTheRecipeItself42"
SCORES = """
def score(completion, gold, api_key, note):
    return float(sum(map(ord, completion)) % 3)
"""


def make_finished_run(directory: Path) -> Path:
    """SFT and three steps of RL, each evaluated and saved, asked by a template in a file that is gone afterwards."""
    template = directory / "ask.txt"
    template.write_text("7*{question}\n", encoding="utf-8")
    recipe = tiny_recipe(
        directory / "runs",
        run={"name": "odd | `name`", "checkpoint_every": 1, "keep_checkpoints": 9},
        prompt={"template": str(template)},
        rollout={"stop": ["#"], "max_new_tokens": 3},
        sft={"steps": 20, "batch_size": 16, "optimizer": {"learning_rate": 1e-2}},
        training={"steps": 3},
        evaluation={"every": 1, "samples": 2, "k": [1, 2]},
    )
    path = quick_train(recipe)
    template.unlink()
    return path


def make_run_with_keys(directory: Path) -> Path:
    """One step, rewarded by a function of the user's that is given keys; nothing is evaluated as right or wrong."""
    directory.mkdir()
    (directory / "mine.py").write_text(SCORES, encoding="utf-8")
    arguments = {"api_key": STORED_KEY, "note": PRINTED_KEY}
    function = {"type": "function", "function": f"{directory}/mine.py:score", "timeout": None, "arguments": arguments}
    return quick_train(
        tiny_recipe(
            directory / "runs",
            rewards={"mine": function},
            training={"steps": 1},
            evaluation={"accuracy": None, "metric": "reward"},
        ),
    )


def contents(folder: Path) -> str:
    """All that stands in a folder, the bytes of weights included."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return "\n".join(f"{path.relative_to(folder)}\n{path.read_bytes().decode('latin-1')}" for path in files)


def python_of(card: str) -> str:
    """The Python of a model card."""
    (block,) = re.findall(r"^```python\n(.*?)^```", card, flags=re.MULTILINE | re.DOTALL)
    return str(block)


def card_of(config: RunConfig, folder: Path, *, objects: tuple[str, ...] = ()) -> str:
    """The model card of a step of RL by a recipe; `folder` has the files beside it."""
    from flatpeak.apps.publish.model_card import CardSource, write_card
    from flatpeak.pipeline.prompt_record import make_prompt_record

    return write_card(
        CardSource(
            repo="me/tiny",
            run_name="x",
            config=config,
            record=make_prompt_record(config, task="gsm8k", objects=objects),
            summary=None,
            manifest={},
            folder=folder,
            stage="train",
            step=1,
            adapter=config.model.lora is not None,
        )
    )


def copied(run: Path, target: Path, change: Callable[[Path], None] = lambda path: None) -> Path:
    """A copy of a run, changed."""
    shutil.copytree(run, target, symlinks=True)
    change(target)
    return target
