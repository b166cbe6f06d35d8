"""The report: what it says of a measurement, and what it leaves alone in RESULTS.md."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks.harness import report
from benchmarks.harness.tables import BENCHMARKS


def measured(benchmark: str, **changes: Any) -> dict[str, Any]:
    measurements = [{"tokens": 10.0, "cpu": 1.0, "wall": 1.0, "peak_mib": 5.0, "step": 10.0, "accuracy": 0.95}]
    measurements[0] |= {"update_cpu": 0.5, "update_wall": 0.5}
    ours = {"training_pass": "shared", "mixed_lengths": "together", "engines": "native"}
    ours = (ours | {"trackers": "step", "distributed": "2 processes"}).get(benchmark, "flatpeak")
    row = {"name": "1M, skewed", "seconds": 90.0, "goal": 0.9, "limit": 50, "contenders": {ours: measurements}}
    facts = {
        "started": "2026-01-02T03:04:05+00:00",
        "command": [
            "python",
            "-m",
            f"benchmarks.cpu.{benchmark}",
            "--json",
            "some/folder/out.json",
            "--row",
            "1M, skewed",
        ],
        "versions": {"flatpeak": "0.1.0", "torch": "2.13", "safetensors": "1", "trl": None},
        "commit": {"flatpeak": "0123456789abcdef"},
        "hardware": {"cpu": "Some CPU", "cores": 2, "memory_gib": 23.5},
    }
    return {"part": benchmark, "quick": False, "facts": facts, "rows": [row | changes]}


@pytest.mark.parametrize("benchmark", BENCHMARKS)
def test_every_benchmark_is_reported_with_its_command_and_what_it_ran_on(benchmark: str) -> None:
    text = report.render(measured(benchmark, reported={"vllm": "0.32", "parameters": 7, "decoder": "kernels-x"}))
    assert f'python -m benchmarks.cpu.{benchmark} --json out.json --row "1M, skewed"' in text
    assert "2026-01-02, commit 0123456789; Some CPU,\n2 cores, 23.5 GiB, " in text
    assert ("one thread for each contender;" in text) == (benchmark not in ("distributed", "real_model"))
    assert "flatpeak 0.1.0, torch 2.13, vllm 0.32, decoder kernels-x." in text
    assert "It took 2 minutes." in text
    assert "| 1M, skewed | " in text
    assert "--json FILE" not in text


def test_only_what_stands_between_a_parts_comments_is_replaced() -> None:
    text = "# Results\n\nBefore.\n\n<!-- bench:engine -->\nold\n<!-- /bench:engine -->\n\nAfter, by hand.\n"
    new = report.replace_section(text, "engine", "Engine", "new \\1")
    assert new == text.replace("old", "new \\1")
    assert report.replace_section(new, "engine", "Engine", "new \\1") == new


def test_a_part_without_comments_becomes_a_section_at_the_end() -> None:
    text = report.replace_section("# Results\n\n## By hand\n\nWords.\n", "step", "Steps", "table")
    assert text == (
        "# Results\n\n## By hand\n\nWords.\n\n## Steps\n\n<!-- bench:step -->\ntable\n<!-- /bench:step -->\n"
    )


def test_a_report_fills_in_what_a_folder_has_and_keeps_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "memory.json").write_text(json.dumps(measured("memory")), encoding="utf-8")
    kept = report.RESULTS.read_text(encoding="utf-8")
    into = tmp_path / "RESULTS.md"
    into.write_text(kept, encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["report", str(tmp_path), "--into", str(into)])
    report.main()
    text = into.read_text(encoding="utf-8")
    assert text.count("<!-- bench:memory -->") == 1
    assert "1M, skewed" in text
    by_hand = kept[kept.index("## What gradient regularization costs") :].partition("\n## ")[0].strip()
    assert by_hand in text
    assert len(by_hand) > 1000


def test_a_tracker_is_measured_against_a_fiftieth_of_the_step() -> None:
    seconds = {"step": (0.2, 0.2), "mlflow": (0.002, 0.004), "x": (0.01,)}
    contenders = {name: [{"cpu": cpu} for cpu in values] for name, values in seconds.items()}
    versions, once = {"mlflow": "3", "x": "1"}, {"mlflow": 4, "x": 1}
    row = {"name": "demo", "contenders": contenders, "versions": versions, "once": once}
    text = BENCHMARKS["trackers"].table([row])
    assert "| demo | none: the step itself | 0.2 |" in text
    assert "| demo | mlflow 3 | 0.003 (0.002 to 0.004) | 1.5 (1 to 2) % | 2 % | aim reached | 4 |" in text
    assert "| demo | x 1 | 0.01 | 5 % | 2 % | **misses** | 1 |" in text
