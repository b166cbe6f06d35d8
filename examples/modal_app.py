"""A recipe on rented GPUs at Modal, with runs on a volume; after a preemption it resumes from its last checkpoint.

    modal run --detach examples/modal_app.py --recipe flatpeak:demo --settings "training.steps=100"
    modal run --detach examples/modal_app.py --recipe flatpeak:demo --seeds 0,1,2,3     # in parallel
    modal volume get flatpeak-runs demo runs/demo

Set GPUS to the number that a run needs; each gets a process. Needs `pip install modal` and an account. The secret
`huggingface` holds HF_TOKEN, for gated models: `modal secret create huggingface HF_TOKEN=...`.
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
    """The command of a run; with a seed, of one of several runs, whose name ends with the seed."""
    own = [] if seed is None else [f"run.seed={seed}", f"run.name=seed-{seed}"]
    given = [*settings.split(), *own, f"run.directory={RUNS}", f"distributed.processes={GPUS}"]
    # --resume also starts new runs, so the first start and a restart after preemption use the same command.
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
    """Train on the machine that Modal has assigned; raise if the run failed, so that Modal retries it."""
    code = subprocess.run(command(recipe, settings, seed), check=False).returncode
    volume.commit()
    if code in (1, 130, 143):  # 2 is a mistake in the recipe, which a retry would repeat
        raise RuntimeError(f"the run ended with exit code {code}")
    return code


@app.local_entrypoint()
def main(recipe: str = "flatpeak:demo", settings: str = "", seeds: str = "") -> None:
    """Start one run, or one per seed, on separate machines."""
    if not seeds:
        train.remote(recipe, settings)
        return
    cells = [(recipe, settings, int(seed)) for seed in seeds.split(",")]
    list(train.starmap(cells))
