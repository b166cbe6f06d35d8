"""The folder for the Hub: others load it with the run's answers, and nothing of its author's machine is in it."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from flatpeak.apps.compare import compare_checkpoints
from flatpeak.apps.publish.push import FolderFile, push
from flatpeak.config.load import load_recipe, parse_config
from flatpeak.errors import UserError
from flatpeak.pipeline.prompt_record import PROMPT_RECORD, read_prompt_record
from flatpeak.pipeline.train_reward_model import train_reward_model
from flatpeak.policy.config import ModelConfig
from flatpeak.policy.loading import load_policy
from flatpeak.rewards.sequence_classifier import load_model
from support.gguf import gguf_model, write_gguf
from support.preferences import reward_model_recipe, write_pairs
from support.pushed_runs import PRINTED_KEY, STORED_KEY, contents, copied, python_of
from support.reward_functions import odd
from support.runs import quick_train, tiny_recipe

MODEL = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
BESIDE = {"README.md", "flatpeak.json", "recipe.yaml"}


def names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def ran(folder: Path, **replaced: str) -> str:
    """What the snippet of the card prints, run on the folder itself."""
    code = python_of((folder / "README.md").read_text(encoding="utf-8"))
    code = code.replace("'me/tiny'", repr(str(folder)))
    for before, after in replaced.items():
        code = code.replace(before, after)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(code, {})
    return printed.getvalue().strip("\n")


def test_the_folder_holds_the_model_as_others_load_it_and_answers_as_the_run_did(
    finished_run: Path, tmp_path: Path
) -> None:
    announced: list[FolderFile] = []
    result = push(finished_run, repo="me/tiny", checkpoint="3", dry_run=tmp_path / "dry", announce=announced.extend)
    folder = tmp_path / "dry"
    assert names(folder) == MODEL | BESIDE
    assert announced == list(result.files)
    assert {file.name: file.size for file in announced} == {
        name: (folder / name).stat().st_size for name in names(folder)
    }
    source = finished_run / "checkpoints" / "step_000003"
    assert (folder / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), PreTrainedTokenizerFast.from_pretrained(folder)
    rows = [json.loads(line) for line in (finished_run / "evaluations" / "train_000003.jsonl").open()]
    task = parse_config(load_recipe(finished_run / "config.yaml")).task.load()
    assert len(rows) == 6
    for row, example in zip(rows, task.test, strict=True):
        ids = tokenizer(f"7*{example.question}", return_tensors="pt").input_ids
        answer = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False)
        assert tokenizer.decode(answer[0, ids.shape[1] :], skip_special_tokens=True) == row["text"]
    assert ran(folder) == rows[0]["text"]


def test_a_pushed_folder_is_evaluated_as_its_run_was_and_its_recipe_is_whole(
    finished_run: Path, tmp_path: Path
) -> None:
    push(finished_run, repo="me/tiny", dry_run=tmp_path / "dry")
    whole, pushed = compare_checkpoints([str(finished_run), str(tmp_path / "dry")]).evaluations
    assert pushed.metrics() == whole.metrics()
    recipe = parse_config(load_recipe(tmp_path / "dry" / "recipe.yaml"))
    original = parse_config(load_recipe(finished_run / "config.yaml"))
    assert recipe.prompt.template == "7*{question}"
    assert recipe.run.directory == "runs"
    changed = {"run": original.run, "prompt": original.prompt}
    assert recipe.model_copy(update=changed) == original


@pytest.mark.parametrize("extras", [(), ("rollouts", "report")])
def test_no_key_and_no_local_path_is_in_any_file(
    run_with_keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, extras: tuple[str, ...]
) -> None:
    key = "the-key-of-a-judge"
    monkeypatch.setenv("MY_JUDGE", key)
    monkeypatch.setenv("OTHER_JUDGE", "EMPTY")  # the key of a server that wants none
    monkeypatch.setenv("HF_TOKEN", "hf_ofTheEnvironmentItself")

    def add_judge(run: Path) -> None:
        recipe = yaml.safe_load((run / "config.yaml").read_text())
        endpoint = {"type": "endpoint", "base_url": "https://judge.example/v1", "model": "m", "api_key_env": "MY_JUDGE"}
        recipe["rewards"]["judged"] = {"type": "judge", "backend": endpoint}
        recipe["rewards"]["other"] = {"type": "judge", "backend": endpoint | {"api_key_env": "OTHER_JUDGE"}}
        recipe["run"]["directory"] = str(tmp_path / "somewhere")
        (run / "config.yaml").write_text(yaml.safe_dump(recipe))
        row = json.dumps({"text": f"{key} {run.absolute()}/x {os.environ['HF_TOKEN']} EMPTY /3", "prompt": "1+1="})
        (run / "rollouts" / "step_000001.jsonl").write_text(row + "\n")
        (run / "report.html").write_text(f"<p>{key} {Path.home()}/y</p>")

    run = copied(run_with_keys, tmp_path / "run", add_judge)
    push(run, repo="me/tiny", extras=extras, dry_run=tmp_path / "dry")
    text = contents(tmp_path / "dry")
    assert names(tmp_path / "dry") >= MODEL | BESIDE
    for secret in (key, STORED_KEY, PRINTED_KEY, os.environ["HF_TOKEN"]):
        assert secret not in text
    for place in (tmp_path, run_with_keys.parents[1], Path.home(), Path.cwd()):
        assert str(place) not in text
    if extras:
        row = json.loads((tmp_path / "dry" / "rollouts" / "step_000001.jsonl").read_text())
        assert row["text"] == "[redacted] path/to/x [redacted] EMPTY /3"
        assert (tmp_path / "dry" / "report.html").read_text() == "<p>[redacted] path/to/y</p>"
    recipe = yaml.safe_load((tmp_path / "dry" / "recipe.yaml").read_text())
    assert recipe["rewards"]["mine"]["function"] == "path/to/mine.py:score"
    assert recipe["rewards"]["judged"]["backend"]["api_key_env"] == "MY_JUDGE"
    card = (tmp_path / "dry" / "README.md").read_text()
    assert "to be given again: `rewards.mine.function`, `rewards.mine.arguments.api_key`" in card


def test_a_key_in_the_models_own_settings_is_refused_by_the_files_name(finished_run: Path, tmp_path: Path) -> None:
    def spoil(run: Path) -> None:
        path = run / "checkpoints" / "step_000003"
        settings = json.loads((path / "config.json").read_text()) | {"note": PRINTED_KEY}
        (path / "config.json").write_text(json.dumps(settings))
        from flatpeak.runs.checkpoints import MANIFEST, write_manifest

        (path / MANIFEST).unlink()
        write_manifest(path, step=3)

    run = copied(finished_run, tmp_path / "run", spoil)
    with pytest.raises(UserError, match=r"config\.json holds a key or token, which is not uploaded") as caught:
        push(run, repo="me/tiny", checkpoint="last", dry_run=tmp_path / "dry")
    assert PRINTED_KEY not in str(caught.value)
    assert not (tmp_path / "dry").exists()


def test_the_recipe_over_a_gguf_file_names_the_base_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    recipe = tiny_recipe(tmp_path / "runs")
    file = write_gguf(tmp_path / "m.gguf", gguf_model())
    recipe["model"] = {"path": str(file), "device": "cpu", "lora": {"rank": 2}}
    run = quick_train(recipe, reward=odd)
    push(run, repo="me/tiny", checkpoint="last", base_model="me/base", dry_run=tmp_path / "dry")
    assert yaml.safe_load((tmp_path / "dry" / "recipe.yaml").read_text())["model"]["path"] == "me/base"
    assert str(tmp_path) not in contents(tmp_path / "dry")


def test_adapters_name_their_base_on_the_hub_and_peft_loads_them_with_equal_answers(base: Path, tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path / "runs", optimizer={"learning_rate": 0.1})
    recipe["model"] = {"path": str(base), "device": "cpu", "lora": {"rank": 4}}
    run = quick_train(recipe, reward=odd)
    with pytest.raises(UserError, match="name the same model on the Hub with --base-model OWNER/NAME, or merge them"):
        push(run, repo="me/tiny", dry_run=tmp_path / "dry")
    folder = tmp_path / "dry"
    push(run, repo="me/tiny", checkpoint="last", base_model="me/base", dry_run=folder)
    assert names(folder) == BESIDE | {
        *("adapter_config.json", "adapter_model.safetensors", "adapter_base.json"),
        *("tokenizer.json", "tokenizer_config.json"),
    }
    settings = json.loads((folder / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == "me/base"
    assert yaml.safe_load((folder / "recipe.yaml").read_text())["model"]["path"] == "me/base"
    record = read_prompt_record(folder)
    assert record is not None
    assert (record.base_model, record.objects) == ("me/base", ("reward",))
    card = (folder / "README.md").read_text()
    assert {"base_model: me/base", "base_model_relation: adapter"} <= set(card.splitlines())
    assert "library_name: peft" in card
    assert str(tmp_path) not in contents(folder)
    # The Hub would answer to that name with this directory.
    settings["base_model_name_or_path"] = str(base)
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    alone = AutoPeftModelForCausalLM.from_pretrained(folder).eval()
    policy = load_policy(ModelConfig(path=str(run / "checkpoints" / "last"), device="cpu"))
    ids = torch.tensor([[3, 4, 5, 6]])
    with torch.no_grad(), policy.plain_attention() as model:
        torch.testing.assert_close(alone(input_ids=ids).logits, model.eval()(input_ids=ids).logits, atol=0, rtol=0)
        plain = AutoModelForCausalLM.from_pretrained(base).eval()
        assert not torch.equal(plain(input_ids=ids).logits, alone(input_ids=ids).logits)
    policy.release()
    assert len(ran(folder)) <= 4


def test_a_reward_model_is_pushed_with_python_that_scores_as_it_does(tmp_path: Path) -> None:
    pairs = write_pairs(tmp_path / "pairs.jsonl", count=40)
    run = train_reward_model(reward_model_recipe(tmp_path / "runs", pairs), progress=False).path
    folder = tmp_path / "dry"
    push(run, repo="me/tiny", checkpoint="last", dry_run=folder)
    assert "reward_model.json" in names(folder)
    card = (folder / "README.md").read_text()
    assert "pipeline_tag: text-classification" in card
    assert "flatpeak reward-model recipe.yaml" in card
    assert "held-out pairs" in card
    printed = float(ran(folder))
    model, tokenizer, record = load_model(str(folder), where="x", device=torch.device("cpu"))
    assert record is not None
    text = record.template.replace("{prompt}", "What is 12 + 30?").replace("{completion}", "42")
    ids = torch.tensor([[*tokenizer.encode(text), tokenizer.eos_token_id]])
    with torch.no_grad():
        hidden = model.model(input_ids=ids).last_hidden_state[0, -1]
        assert printed == pytest.approx(float(model.score(hidden)), abs=1e-5)


def test_a_run_of_sft_alone_and_one_that_is_still_written_say_so(finished_run: Path, tmp_path: Path) -> None:
    def only_sft(run: Path) -> None:
        for path in (run / "checkpoints").glob("[!s]*"):
            path.unlink()
        for path in (run / "checkpoints").glob("step_*"):
            shutil.rmtree(path)
        summary = json.loads((run / "summary.json").read_text())
        summary |= {"best_step": None, "last_step": 20, "status": "running", "checkpoints": []}
        summary["evaluations"] = [row for row in summary["evaluations"] if row["stage"] != "train"]
        (run / "summary.json").write_text(json.dumps(summary))

    run = copied(finished_run, tmp_path / "run", only_sft)
    with (run / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        push(run, repo="me/tiny", dry_run=tmp_path / "dry")
    card = (tmp_path / "dry" / "README.md").read_text()
    assert "> **The run that made this model is still being written, or was killed.**" in card
    assert "trained by supervised fine-tuning on the task `arithmetic`" in card
    assert "the checkpoint of SFT step 20 of the run `` odd | `name` ``" in card
    assert "flatpeak sft recipe.yaml" in card
    assert "RL:" not in card
    assert "| Metric | before training | after SFT = this checkpoint |" in card


def test_a_run_without_a_summary_is_pushed_and_a_checkpoint_without_its_record_is_refused(
    finished_run: Path, tmp_path: Path
) -> None:
    unfinished = copied(finished_run, tmp_path / "unfinished", lambda run: (run / "summary.json").unlink())
    push(unfinished, repo="me/tiny", dry_run=tmp_path / "dry")
    card = (tmp_path / "dry" / "README.md").read_text()
    assert "The run has no evaluation" in card
    assert "model-index" not in card

    def lose_records(run: Path) -> None:
        from flatpeak.runs.checkpoints import MANIFEST, write_manifest

        for path in (run / "checkpoints").glob("step_*"):
            (path / PROMPT_RECORD).unlink()
            (path / MANIFEST).unlink()
            write_manifest(path, step=int(path.name[5:]))

    with pytest.raises(UserError, match=r"has lost its flatpeak\.json: push another checkpoint by --checkpoint"):
        push(copied(finished_run, tmp_path / "run", lose_records), repo="me/tiny", dry_run=tmp_path / "other")


def other_run(tmp_path: Path) -> Path:
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "config.json").write_text("{}")
    return tmp_path / "plain"


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"repo": "tiny"}, r"--repo tiny: give it with its owner, as in --repo your-name/tiny"),
        ({"repo": "me/a/b"}, r"--repo me/a/b: give it with its owner"),
        ({"repo": "me/my model"}, r"--repo me/my model: "),
        ({"checkpoint": "7"}, r"--checkpoint 7: .* has .*step_000003.*; give best, last, sft or the number of a step"),
        ({"checkpoint": "bset"}, r"--checkpoint bset: .*give best, last, sft"),
        ({"extras": ("report", "rolouts")}, r"--with rolouts: choose among rollouts, report, did you mean 'rollouts'"),
        ({"base_model": "base"}, r"--base-model base: give it with its owner, as in --base-model your-name/base"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_cannot_be_pushed_is_one_line_that_names_the_fix(
    finished_run: Path, tmp_path: Path, settings: dict[str, Any], problem: str
) -> None:
    with pytest.raises(UserError, match=problem) as caught:
        push(finished_run, **{"repo": "me/tiny", "dry_run": tmp_path / "dry", **settings})
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "dry").exists()


def test_what_is_no_run_has_no_card_and_a_folder_is_not_overwritten(finished_run: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is made of a run's files, and this belongs to no run.*hf upload"):
        push(other_run(tmp_path), repo="me/tiny", dry_run=tmp_path / "dry")
    with pytest.raises(UserError, match="no such run or model directory"):
        push(tmp_path / "nothing", repo="me/tiny", dry_run=tmp_path / "dry")
    with pytest.raises(UserError, match=r"plain exists and is not empty: give a new directory"):
        push(finished_run, repo="me/tiny", dry_run=tmp_path / "plain")
    unlogged = copied(finished_run, tmp_path / "unlogged", lambda run: shutil.rmtree(run / "rollouts"))
    with pytest.raises(UserError, match=r"--with rollouts: .*unlogged has none \(run.log_rollouts_every=0"):
        push(unlogged, repo="me/tiny", extras=("rollouts",), dry_run=tmp_path / "dry")
    assert not (tmp_path / "dry").exists()
    empty = copied(finished_run, tmp_path / "empty", lambda run: shutil.rmtree(run / "checkpoints"))
    with pytest.raises(UserError, match="is a run without a checkpoint"):
        push(empty, repo="me/tiny", dry_run=tmp_path / "dry")


def test_a_moved_run_and_one_of_its_checkpoints_by_path_are_the_same_folder(
    finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = copied(finished_run, tmp_path / "elsewhere" / "moved")
    monkeypatch.chdir(moved.parent)
    push("moved", repo="me/tiny", checkpoint="last", dry_run="one")
    push(moved / "checkpoints" / "step_000003", repo="me/tiny", dry_run="two")
    push(finished_run, repo="me/tiny", checkpoint="3", dry_run="three")
    assert contents(Path("one")) == contents(Path("two")) == contents(Path("three"))


def test_a_path_with_spaces_is_hidden_and_named(finished_run: Path, tmp_path: Path) -> None:
    def train_on_rows(run: Path) -> None:
        recipe = yaml.safe_load((run / "config.yaml").read_text())
        recipe["task"] = {"type": "rows", "train": [{"path": "/mnt/My Drive/of me/rows.jsonl"}]}
        (run / "config.yaml").write_text(yaml.safe_dump(recipe))

    push(copied(finished_run, tmp_path / "run", train_on_rows), repo="me/tiny", dry_run=tmp_path / "dry")
    assert "My Drive" not in contents(tmp_path / "dry")
    recipe = yaml.safe_load((tmp_path / "dry" / "recipe.yaml").read_text())
    assert recipe["task"]["train"][0]["path"] == "path/to/rows.jsonl"
    assert "to be given again: `task.train.0.path`" in (tmp_path / "dry" / "README.md").read_text()


def test_the_arguments_of_ones_own_loss_are_told_without_their_places(finished_run: Path, tmp_path: Path) -> None:
    def train_by_own_loss(run: Path) -> None:
        recipe = yaml.safe_load((run / "config.yaml").read_text())
        arguments = {"table": "/mnt/data/my files/bounds.json", "epsilon": 0.2, "more": ["/srv/my files/x.json"]}
        recipe["objective"] |= {"loss": "/mnt/my files/mine.py:bounded", "arguments": arguments}
        recipe["advantage"] |= {"function": "/mnt/my files/mine.py:centred", "arguments": {"path": "/mnt/my files/y"}}
        (run / "config.yaml").write_text(yaml.safe_dump(recipe))

    push(copied(finished_run, tmp_path / "run", train_by_own_loss), repo="me/tiny", dry_run=tmp_path / "dry")
    assert "my files" not in contents(tmp_path / "dry")
    card = (tmp_path / "dry" / "README.md").read_text()
    assert "`bounded`, epsilon=0.2, more=['path/to/x.json'], table=path/to/bounds.json, with the token" in card


def test_relative_paths_of_files_that_are_not_uploaded_are_named(
    finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train_on_own_files(run: Path) -> None:
        recipe = yaml.safe_load((run / "config.yaml").read_text())
        recipe["model"] |= {"new": None, "path": "./base"}
        recipe["task"] = {"type": "rows", "train": [{"path": "mine.jsonl"}, {"path": "not/there.jsonl"}]}
        recipe["rewards"] = {"mine": {"type": "function", "function": "rewards.py:score"}}
        (run / "config.yaml").write_text(yaml.safe_dump(recipe))

    monkeypatch.chdir(tmp_path)
    Path("mine.jsonl").touch()
    pushed = push(copied(finished_run, tmp_path / "run", train_on_own_files), repo="me/tiny", dry_run=tmp_path / "dry")
    assert pushed.local == ("model.path", "task.train.0.path", "rewards.mine.function")
    card = (tmp_path / "dry" / "README.md").read_text()
    assert "put yours there, or change `model.path`, `task.train.0.path`, `rewards.mine.function`." in card
    assert yaml.safe_load((tmp_path / "dry" / "recipe.yaml").read_text())["model"]["path"] == "./base"


def test_the_card_of_a_recipe_without_local_files_names_none(finished_run: Path, tmp_path: Path) -> None:
    assert push(finished_run, repo="me/tiny", dry_run=tmp_path / "dry").local == ()
    assert "which are not in this repository" not in (tmp_path / "dry" / "README.md").read_text()


def test_the_snippet_samples_as_in_training_whatever_the_models_own_settings_are(
    finished_run: Path, tmp_path: Path
) -> None:
    row = json.loads((finished_run / "evaluations" / "train_000003.jsonl").open().readline())

    def suppress_the_answer(run: Path) -> None:
        from flatpeak.runs.checkpoints import MANIFEST, write_manifest

        path = run / "checkpoints" / "step_000003"
        (answer, *_) = PreTrainedTokenizerFast.from_pretrained(path).encode(row["text"])
        settings = json.loads((path / "generation_config.json").read_text()) | {"suppress_tokens": [answer]}
        (path / "generation_config.json").write_text(json.dumps(settings))
        (path / MANIFEST).unlink()
        write_manifest(path, step=3)

    run = copied(finished_run, tmp_path / "run", suppress_the_answer)
    push(run, repo="me/tiny", checkpoint="last", dry_run=tmp_path / "dry")
    assert ran(tmp_path / "dry") == row["text"]


def test_a_forked_run_says_where_it_comes_from(finished_run: Path, tmp_path: Path) -> None:
    def fork(run: Path) -> None:
        manifest = json.loads((run / "manifest.json").read_text())
        manifest |= {
            "forked": {
                "run": "/home/me/runs/first",
                "step": 2,
                "changed": {"run.name": "", "kl.coefficient": "0 -> 1"},
            },
            "resumed": [{}, {}],
        }
        (run / "manifest.json").write_text(json.dumps(manifest))

    push(copied(finished_run, tmp_path / "run", fork), repo="me/tiny", dry_run=tmp_path / "dry")
    card = (tmp_path / "dry" / "README.md").read_text()
    assert "Forked from the run `first` after step 2." in card
    assert "Resumed 2 times;" in card
    assert "steps up to 2 are those of another run, of whose recipe it has changed `kl.coefficient`." in card
    assert "of such a run" not in card
    assert "/home/me" not in card
