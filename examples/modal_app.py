"""A recipe on rented GPUs at Modal, with runs on a volume: preempted, it goes on from its last checkpoint.

    modal run --detach examples/modal_app.py --recipe flatpeak:demo --settings "training.steps=100"
    modal run --detach examples/modal_app.py --recipe flatpeak:demo --seeds 0,1,2,3     # side by side
    modal volume get flatpeak-runs demo runs/demo

Change GPUS to what a run needs; a process is started for each. Needs `pip install modal` and an account. The secret
`huggingface` holds HF_TOKEN, for models that ask for one: `modal secret create huggingface HF_TOKEN=...`.
"""

from __future__ import annotations

import subprocess
import sys

import modal

GPU, GPUS = "H100", 2
HOURS = 24
RUNS, CODE = "/runs", "/code"

app = modal.App("flatpeak")
volume = modal.Volume.from_name("flatpeak-runs", create_if_missing=True)
image = (
    modal.Image.debian_slim(python_version="3.11")
    .pip_install_from_pyproject("pyproject.toml", optional_dependencies=["qlora"])
    .env({"PYTHONPATH": CODE, "HF_HOME": f"{RUNS}/.cache"})
    .add_local_dir("src/flatpeak", f"{CODE}/flatpeak")
    .add_local_dir("recipes", f"{CODE}/recipes")
)


def command(recipe: str, settings: str = "", seed: int | None = None) -> list[str]:
    """The command of a run; with a seed, of one of several, whose name ends with it."""
    own = [] if seed is None else [f"run.seed={seed}", f"run.name=seed-{seed}"]
    given = [*settings.split(), *own, f"run.directory={RUNS}", f"distributed.processes={GPUS}"]
    # --resume starts a run that does not exist yet: the first start and the one after preemption are the same.
    return [sys.executable, "-m", "flatpeak", "train", recipe, *given, "--resume"]


@app.function(
    image=image,
    gpu=f"{GPU}:{GPUS}",
    volumes={RUNS: volume},
    secrets=[modal.Secret.from_name("huggingface")],
    timeout=HOURS * 3600,
    retries=modal.Retries(max_retries=3, initial_delay=10.0),
)
def train(recipe: str, settings: str = "", seed: int | None = None) -> int:
    """Train on the machine that Modal has found; raises where the run failed, so that it is tried again."""
    code = subprocess.run(command(recipe, settings, seed), check=False).returncode
    volume.commit()
    if code in (1, 130, 143):  # 2 is a mistake in the recipe, which another try would repeat
        raise RuntimeError(f"the run ended with exit code {code}")
    return code


@app.local_entrypoint()
def main(recipe: str = "flatpeak:demo", settings: str = "", seeds: str = "") -> None:
    """Start one run, or one for each of the seeds, on machines of their own."""
    if not seeds:
        train.remote(recipe, settings)
        return
    cells = [(recipe, settings, int(seed)) for seed in seeds.split(",")]
    list(train.starmap(cells))
