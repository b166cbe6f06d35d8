"""The tables of a real model: its parts beside the product, and what it is asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.cpu.real_model import BFLOAT16, MAX_NEW_TOKENS, chat_workload
from benchmarks.cpu.real_model_worker import PARTS
from benchmarks.harness.models import word_tokenizer
from benchmarks.harness.tables import real_model
from benchmarks.harness.workloads import EOS, PAD, prompt_ids, prompt_texts


def turns(cpu: float, wall: float) -> list[dict[str, float]]:
    """Two turns, of which the second is half as fast; parts after the product at 0.7 of its rate."""
    rates = {"cpu": cpu, "wall": wall}
    share = {part: 1.0 if part == "product" else 0.7 for part in PARTS}
    return [
        {f"{part} {clock}": rate * share[part] / slower for part in PARTS for clock, rate in rates.items()}
        for slower in (1, 2)
    ]


def test_rates_stand_beside_the_products_and_two_threads_beside_one() -> None:
    row: dict[str, Any] = {"name": "parts", "parts": PARTS, "failures": {"x": "ValueError: no\n"}}
    row["contenders"] = {"1 thread": turns(80, 60), "2 threads": turns(70, 90)}
    lines = real_model([row]).splitlines()
    assert lines[2] == "| product | 1 thread | 60 (40 to 80) | 45 | 1 |  |  |  |  |  |"
    assert lines[4] == "| decode | 1 thread | 42 (28 to 56) | 31.5 | 0.7 | 0.65 / 0.75 | must reached |  |  |  |"
    judged = "0.7 | 0.65 / 0.75 | must reached | 1.5 | 1.7 / 1.7 | below must |"
    assert lines[5] == f"| decode | 2 threads | 36.8 (24.5 to 49) | 47.2 | {judged}"
    assert lines[-1] == "|  | x | failed: ValueError: no |  |  |  |  |  |  |  |"
    assert len(lines) == 2 + 2 * len(PARTS) + 1


def test_rollouts_and_steps_are_judged_beside_the_others() -> None:
    fast, slow = ([{"tokens": 10.0, "cpu": cpu, "wall": cpu, "peak_mib": 5.0}] for cpu in (1.0, 2.5))
    rollouts = {"flatpeak": fast, "vLLM": slow, "transformers generate": slow}
    rows = [
        {"name": "rollouts", "contenders": rollouts},
        {"name": BFLOAT16, "contenders": {"vLLM, bfloat16": slow, "flatpeak": fast}},
        {"name": "steps", "contenders": {"flatpeak": fast, "TRL, 8 at a time": slow}},
    ]
    ends = [line.split("|")[-4:-1] for line in real_model(rows).splitlines()[2:]]
    assert [[cell.strip() for cell in cells] for cells in ends] == [
        ["", "", ""],
        ["2.5", "2 / 2", "aim reached"],
        ["2.5", "3 / 3", "below must"],
        ["2.5", "", ""],
        ["", "", ""],
        ["", "", ""],
        ["2.5", "2 / 3", "must reached"],
    ]


def test_every_round_asks_a_real_model_for_other_texts_that_all_libraries_read_as_the_same_tokens(
    tmp_path: Path,
) -> None:
    tokenizer = word_tokenizer(10)
    tokenizer.save_pretrained(tmp_path)
    work = chat_workload(tmp_path, steps=3, quick=False)
    texts = [text for step in range(3) for text in prompt_texts(work, step)]
    assert len(set(texts)) == 3 * 4
    assert all("List the numbers in this text" in text for text in texts)
    assert prompt_ids(work, 1) == [tokenizer(text)["input_ids"] for text in texts[4:8]]
    assert (work.eos, work.pad, work.limits.cap) == (EOS, PAD, MAX_NEW_TOKENS)
    assert work.limits.longest_prompt == max(len(tokenizer(text)["input_ids"]) for text in texts)
    assert work.useful_tokens([5, EOS, PAD]) == 2
