"""A comparison as Markdown, JSON and files."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from flatpeak.errors import UserError
from flatpeak.experiments.comparison import compare
from flatpeak.experiments.comparison_report import (
    format_number,
    format_p,
    markdown_table,
    table_path,
    to_json,
    to_markdown,
    write_comparison,
)
from flatpeak.experiments.table import write_table
from support.sweep_tables import ROWS, failed, row, table, write_sweep


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_text_names_runs_that_failed_and_has_every_statistic() -> None:
    text = to_markdown(compare(table(), metrics=["reward/gold", "reward/exploit.first"], alpha=0.01))
    assert "11 of 12 runs done; baseline none; sweep sharp, 9 runs; flatpeak 0.1.0; commit abc (clean)." in text
    assert "- kl, seed 3: failed (RunError: the loss is nan)" in text
    assert "Never, and so counted at their last step: kl 2, gr 1." in text
    assert "at p < 0.01 and power 0.9" in text
    gold, first, reached = (part.partition("\n\n")[2] for part in text.split("\n## ")[1:])
    rows = {cells(line)[0]: cells(line) for line in gold.splitlines() if line.startswith("|")}
    # Means of 0, .2, .1, .1 and their sd sqrt(.02 / 3); t(3) at 97.5% is 3.182.
    assert rows["none"][:4] == ["none", "4", "0.1 [-0.0299, 0.23]", "0.0816"]
    assert rows["none"][4:] == [""] * 8
    assert rows["kl"][1] == "3 (1 missing)"
    assert rows["kl"][4:6] == ["3", "0.567 [0.0496, 1.08]"]
    assert rows["gr"][1] == "3 (1 missing)"
    by_arm = {cells(line)[0]: cells(line) for line in first.splitlines() if line.startswith("|")}
    assert by_arm["kl"][2].startswith("56.7 [")
    shares = {cells(line)[0]: cells(line) for line in reached.splitlines() if line.startswith("|")}
    assert shares["kl"][1:6] == ["1 of 3 (1 missing)", "0.333 [0.0615, 0.792]", "3", "0", "2"]


def test_json_has_every_number_and_null_for_those_that_do_not_exist() -> None:
    content = json.loads(to_json(compare(table(), at_least={"reward/exploit": 0.5})))
    kl = content["metrics"]["reward/gold.final"][1]
    assert kl["arm"] == "kl"
    assert kl["difference"]["estimate"] == pytest.approx(17 / 30)
    assert kl["difference"]["d_z"] == pytest.approx(kl["difference"]["estimate"] / kl["difference"]["sd"])
    assert content["metrics"]["reward/gold.final"][0]["p_holm"] is None
    assert content["outcomes"]["reward/exploit.final >= 0.5"][1]["mcnemar"]["estimate"] == pytest.approx(-2 / 3)
    assert content["arms"][1] == {"name": "kl", "seeds": [1, 2, 4]}
    assert content["unfinished"][0]["reason"] == "RunError: the loss is nan"


@pytest.mark.slow
def test_files_lie_beside_the_table_and_are_the_same_each_time(tmp_path: Path) -> None:
    directory = write_sweep(tmp_path / "sharp")
    path = table_path(directory)
    assert path == directory / "table.csv"
    write_comparison(path)
    written = {file.relative_to(directory): file.read_bytes() for file in directory.rglob("*") if file.is_file()}
    text = written[Path("comparison.md")].decode()
    images = re.findall(r"!\[[^]]*\]\(([^)]+)\)", text)
    assert len(images) == len(set(images)) == 11
    assert {Path(image) for image in images} < set(written)
    assert {"plots/gold_against_kl.svg", "plots/survival_reward-exploit.first.svg"} < set(images)
    write_comparison(path)
    assert {file: (directory / file).read_bytes() for file in written} == written


def test_a_table_is_a_file_or_lies_in_a_sweeps_directory(tmp_path: Path) -> None:
    assert table_path(tmp_path) is None
    assert table_path(tmp_path / "mine.csv") == tmp_path / "mine.csv"
    assert table_path(tmp_path / "mine.json") == tmp_path / "mine.json"
    assert table_path(tmp_path / "missing") is None


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    directory = write_sweep(tmp_path / "sharp")
    (directory / "plots").write_text("in the way")
    with pytest.raises(UserError, match="sharp: cannot be written"):
        write_comparison(directory / "table.csv")


def test_runs_of_one_arm_that_failed_alike_share_a_line() -> None:
    rows = [*ROWS[:4], failed("kl", 1, "nan"), failed("kl", 2, "nan"), failed("kl", 3, "memory"), row("kl", 4, 0, 0, 1)]
    text = to_markdown(compare(table(rows)))
    assert "\n- kl, seeds 1, 2: failed (nan)\n- kl, seed 3: failed (memory)\n" in text


def test_a_baseline_without_a_finished_run_is_told_with_the_way_out() -> None:
    rows = [failed("none", 1, "nan"), failed("none", 2, "nan"), row("kl", 1, 0.5, 0, 1), row("kl", 2, 0.6, 0, 1)]
    told = "The baseline none has no finished run: no arm is compared with it; `--baseline ARM` takes another."
    assert told in to_markdown(compare(table(rows)))
    assert "has no finished run" not in to_markdown(compare(table(rows), baseline="kl"))


def test_many_arms_have_strips_only(tmp_path: Path) -> None:
    rows = [row(f"arm{index}", seed, 0.1 * seed, 0.0, None) for index in range(13) for seed in (1, 2)]
    write_table(table(rows), tmp_path / "table.csv")
    comparison = write_comparison(tmp_path / "table.csv", metrics=["reward/gold"])
    assert len(comparison.arms) == 13
    assert [path.name for path in (tmp_path / "plots").iterdir()] == ["strip_reward-gold.final.svg"]
    assert "With more than 12 arms there are strips only." in (tmp_path / "comparison.md").read_text()


def test_curves_of_a_partial_sweep_keep_the_names_of_the_table(tmp_path: Path) -> None:
    rows = [row("none", 1, 0.1, 0.0, None), {**row("kl", 1, 0.2, 0.0, None), "kl.coefficient": 0.1}]
    rows.append({**failed("kl", 1, "nan"), "kl.coefficient": 0.2})
    write_table(table(rows), tmp_path / "table.csv")
    columns = ("arm", "kl.coefficient", "seed", "step", "reward/gold")
    curves = [{**one, "step": 10, "reward/gold": 0.1} for one in rows[:2]]
    write_table(table(curves, columns), tmp_path / "curves.csv")
    write_comparison(tmp_path / "table.csv")
    assert "kl,coefficient=0.1, n = 1" in (tmp_path / "plots" / "curve_reward-gold.svg").read_text()
    write_table(table([{**curves[0], "kl.coefficient": 0.7}], columns), tmp_path / "curves.csv")
    with pytest.raises(UserError, match=r"curves\.csv has runs of arm none that table\.csv lacks"):
        write_comparison(tmp_path / "table.csv")


def test_numbers_are_short_and_absent_ones_are_dashes() -> None:
    assert [format_number(value) for value in (0.12345, 1234.5, float("nan"), 0.0)] == ["0.123", "1.23e+03", "-", "0"]
    assert [format_p(p) for p in (0.0123, 1.0, 1e-5, float("nan"))] == ["0.012", "1", "< 1e-4", "-"]


def test_markdown_columns_are_aligned_and_bars_escaped() -> None:
    assert markdown_table(["arm", "n"], [["a|b", "10"]]) == "| arm  | n  |\n|------|----|\n| a\\|b | 10 |"


def test_metrics_of_similar_names_have_plots_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    path.write_text("arm,seed,a/b.final,a-b.final\nnone,1,1,2\nkl,1,3,5\n")
    write_comparison(path)
    assert "a/b, mean" in (tmp_path / "plots" / "strip_a-b.final.svg").read_text()
    assert "a-b, mean" in (tmp_path / "plots" / "strip_a-b.final-2.svg").read_text()


@pytest.mark.parametrize("seed", ["", "s1", "1.5", "true", "[1]"])
def test_rows_without_a_whole_number_as_seed_are_refused(tmp_path: Path, seed: str) -> None:
    path = tmp_path / "own.csv"
    path.write_text(f"arm,seed,m.final\nnone,2,1\nnone,{seed},1\nkl,2,3\n")
    with pytest.raises(UserError, match=r"arm none has a row of seed .*: give every row its seed as a whole number"):
        write_comparison(path)
