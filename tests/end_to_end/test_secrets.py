"""A run's files, whole: none has a secret that its recipe gives to a reward function."""

from __future__ import annotations

from pathlib import Path

import pytest

import flatpeak
from flatpeak.errors import UserError
from flatpeak.runs.summary import read_summary
from support.runs import quick_train, tiny_recipe

REWARD = """
def leaky(completion, gold, token, headers, url):
    print("sending", token, headers, url)
    raise RuntimeError(f"401 for {token}")
"""
SECRETS = ("tok-arg-secret-987", "plain-header-secret", "hunter2", "sk-proj-abcdefghijkl")
ARGUMENTS = {
    "token": SECRETS[0],
    "headers": {"X-Api-Key": SECRETS[1]},
    "url": f"https://me:{SECRETS[2]}@host/?n={SECRETS[3]}",
}


def test_no_file_of_a_run_and_no_print_of_its_rewards_has_a_secret(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(REWARD)
    function = {"type": "function", "function": f"{tmp_path}/mine.py:leaky", "arguments": ARGUMENTS, "weight": 0.0}
    recipe = tiny_recipe(
        tmp_path,
        run={"checkpoint_every": 1, "log_rollouts_every": 1},
        rewards={"correctness": {"type": "number"}, "leaky": function},
        training={"steps": 1},
    )
    run = flatpeak.train(recipe, progress=False, command=["flatpeak", f"rewards.leaky={{arguments: {ARGUMENTS}}}"]).path
    files = {path.relative_to(run): path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert {"config.yaml", "manifest.json", "report.html", "notices.jsonl"} <= {str(path) for path in files}
    assert b"401 for [redacted]" in files[Path("notices.jsonl")]
    printed = capfd.readouterr()
    everything = [*files.values(), printed.out.encode(), printed.err.encode()]
    for secret in SECRETS:
        assert not any(secret.encode() in content for content in everything), secret
    # The recipe that has the secrets resumes the run; the run's own recipe says which it lacks.
    resumed = quick_train(recipe, settings=["training.steps=2"], resume=True)
    assert read_summary(resumed / "summary.json").last_step == 2
    with pytest.raises(UserError, match=r"rewards\.leaky\.arguments\.token was left out of .* give it again"):
        flatpeak.train(run / "config.yaml", settings=["training.steps=3"], progress=False, resume=True)
