import json
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml

from flatpeak.errors import UserError
from flatpeak.report.charts import CHARTS, accuracy_curves, charts, metric_curves
from flatpeak.report.curves import curve_svg as plain_curve_svg
from flatpeak.report.page import LiveReport, evaluations_of, groups_over_run, subject, write_report
from flatpeak.report.run_tables import compared_runs, run_table
from flatpeak.runs.directory import RunPaths
from flatpeak.runs.metrics import MetricsWriter
from flatpeak.runs.rollout_log import logged_steps
from flatpeak.runs.summary import write_summary
from support import summaries


def evaluation(stage, step, accuracy, interval=None):
    intervals = {} if interval is None else {"accuracy": interval}
    return summaries.evaluation(
        stage, step, task="sums", size=200, accuracy=accuracy, reward=accuracy, intervals=intervals
    )


EVALUATIONS = (
    evaluation("start", 0, 0.0),
    evaluation("sft", 30, 0.41, (0.34, 0.48)),
    evaluation("train", 20, 0.9, (0.86, 0.94)),
    evaluation("train", 40, 0.97, (0.94, 0.99)),
)
SUMMARY = summaries.summary(*EVALUATIONS)


@pytest.fixture(autouse=True, scope="module")
def drawn_once():
    """Pages of these tests mostly have the same charts, of which each is drawn once."""
    kept = {}

    def curve_svg(*curves, **settings):
        key = repr((curves, settings))
        if key not in kept:
            kept[key] = plain_curve_svg(*curves, **settings)
        return kept[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flatpeak.report.charts.curve_svg", curve_svg)
        yield


def rollout(group, index, reward, text):
    return {
        "group": group,
        "index": index,
        "prompt": f"prompt of {group}",
        "text": text,
        "token_ids": [1, 2, 3],
        "finish_reason": "stop",
        "reward": reward,
        "rewards": {"correctness": reward},
        "advantage": None if reward is None else reward - 0.5,
        "gold": "7",
    }


@pytest.fixture
def run(tmp_path):
    """A run as a trainer leaves it."""
    paths = RunPaths(tmp_path / "demo")
    paths.rollouts.mkdir(parents=True)
    with MetricsWriter(paths.metrics) as writer:
        writer.write(0, "eval", {"eval/sums/accuracy": 0.0})
        for step in range(1, 31):
            writer.write(step, "sft", {"sft/loss": 2 / step})
        writer.write(30, "eval", {"eval/sums/accuracy": 0.41})
        for step in range(1, 41):
            metrics = {"reward/mean": step / 40, "reward/std": 0.4, "policy/entropy": 1 / step}
            speed = {"throughput/response_tokens_per_second": 100.0 * step}
            writer.write(step, "train", {**metrics, "policy/kl_reference": float("nan"), **speed})
    rows = [rollout("flat", i, 1.0, f"flat {i}") for i in range(3)]
    rows += [rollout("wide", i, reward, f"wide {i}") for i, reward in enumerate([0.0, 1.0, None, 0.25, 0.75])]
    for step in (39, 40):
        (paths.rollouts / f"step_{step:06d}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_summary(paths.summary, SUMMARY)
    paths.config.write_text("run:\n  name: demo\n")
    return paths


class Page(HTMLParser):
    """The visible text, the tags that load something, and whether every element is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.addresses: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.addresses += [value for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag not in ("meta", "br", "input"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data.strip())

    @property
    def text(self) -> str:
        return " ".join(text for text in self.texts if text)


def test_the_page_shows_the_figures_of_the_run(run):
    path = write_report(run.path)
    assert path == run.report
    page = Page(path.read_text())
    assert page.open == []
    for figure in (
        "Held-out accuracy before training 0.000",
        "Held-out accuracy after SFT 0.410 [0.340, 0.480]",
        "Held-out accuracy after RL and at its best, step 40 0.970 [0.940, 0.990]",
        "Best step, by accuracy 40",
        "RL steps 40",
        "SFT steps 30",
        "Response tokens per second, median 2100",
        "Wall time of SFT and RL 118 s",
        "train 20 sums 200 0.900 [0.860, 0.940] 0.900",
        "run: name: demo",
    ):
        assert figure in re.sub(r"\s+", " ", page.text)


def test_the_page_says_how_the_run_was_made(run):
    manifest = {
        "started": "2026-01-02T03:04:05+01:00",
        "command": ["flatpeak", "train", "r.yaml", "prompt.system=be brief"],
        "versions": {"flatpeak": "0.1.0", "torch": "2.13.0", "transformers": "5.23.0"},
        "commit": {"flatpeak": "abc12345" * 5, "working_directory": None},
        "hardware": {"cpu": "Some CPU", "cores": 2, "cuda": ["Some GPU"]},
        "decoder": "kernels-x86-64-v4-0123456789abcdef0123 (12.2.0)",
    }
    run.manifest.write_text(json.dumps(manifest))
    text = re.sub(r"\s+", " ", Page(write_report(run.path).read_text()).text)
    assert "flatpeak train r.yaml 'prompt.system=be brief'" in text
    assert "done started 2026-01-02 02:04 UTC · flatpeak 0.1.0 (abc12345), torch 2.13.0, transformers 5.23.0 · " in text
    assert "Some CPU, 2 cores, Some GPU · rollouts by kernels-x86-64-v4-01234567 (12.2.0)" in text


def test_the_page_needs_nothing_from_outside(run):
    page = Page(write_report(run.path).read_text())
    assert all(address.startswith("#") for address in page.addresses)


def test_groups_are_from_all_over_the_run_with_the_most_telling_one_of_each_step_first(run):
    groups = groups_over_run(run)
    assert {group["step"] for group in groups} == set(logged_steps(run.rollouts))
    newest = next(group for group in groups if group["step"] == 40)
    assert (newest["prompt"], newest["size"]) == ("prompt of wide", 4)
    assert newest["completions"][0]["text"] == "wide 1"
    assert newest["completions"][-1]["text"] == "wide 0"
    rewards = [row["reward"] for row in newest["completions"]]
    assert rewards == sorted(rewards, reverse=True)


def test_equal_completions_of_a_group_are_shown_once_with_their_count(run):
    rows = [rollout("g", index, float(index > 0), "same" if index else "other") for index in range(4)]
    (run.rollouts / "step_000041.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (group,) = [group for group in groups_over_run(run) if group["step"] == 41]
    assert [(row["text"], row["count"]) for row in group["completions"]] == [("same", 3), ("other", 1)]
    assert "3 of 4: reward 1.000" in Page(write_report(run.path).read_text()).text


def test_equal_completions_that_a_judge_scored_differently_are_shown_apart(run):
    rows = [rollout("g", index, float(index == 2), "same") for index in range(4)]
    (run.rollouts / "step_000041.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (group,) = [group for group in groups_over_run(run) if group["step"] == 41]
    assert [(row["reward"], row["count"]) for row in group["completions"]] == [(1.0, 1), (0.0, 3)]


def test_a_system_message_that_all_prompts_share_does_not_hide_their_questions(run):
    for path in run.rollouts.glob("*.jsonl"):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        asked = [{**row, "prompt": f"<|system|>Be brief.<|user|>{row['group']}?"} for row in rows]
        path.write_text("".join(json.dumps(row) + "\n" for row in asked))
    assert all(
        group["question"].endswith("?") and "Be brief" not in group["question"] for group in groups_over_run(run)
    )
    assert all("Be brief" in group["prompt"] for group in groups_over_run(run))


def test_a_long_run_shows_groups_of_evenly_spaced_steps(run):
    for step in range(50, 150):
        rows = [rollout(f"g{n}", index, float(index), f"text {index}") for n in range(5) for index in range(2)]
        (run.rollouts / f"step_{step:06d}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    groups = groups_over_run(run)
    steps = sorted({group["step"] for group in groups})
    assert len(groups) <= 20
    assert (steps[0], steps[-1], len(steps)) == (min(logged_steps(run.rollouts)), 149, 10)


def test_text_of_models_and_recipes_cannot_become_markup(run):
    evil = "<script>alert(1)</script>"
    rows = [rollout("g", index, float(index), evil) for index in range(2)]
    (run.rollouts / "step_000041.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run.config.write_text(f"prompt: {evil}\n")
    with MetricsWriter(run.metrics) as writer:
        writer.write(41, "train", {f"reward/{evil}": 1.0})
    text = write_report(run.path).read_text()
    assert text.count("<script") == 1  # the search of the page itself
    assert text.count("&lt;script&gt;alert(1)&lt;/script&gt;") >= 3


def test_the_page_says_what_stopped_a_run_and_where_its_curves_begin(run):
    write_summary(run.summary, replace(SUMMARY, status="stopped", signal=2))
    text = Page(write_report(run.path).read_text()).text
    assert "stopped by Ctrl-C" in text
    assert "Held-out curves begin at step 0 with the model that RL began with" in text


@pytest.mark.parametrize(
    ("model", "named"),
    [
        ({"path": "Qwen/Qwen2.5-0.5B"}, "Qwen/Qwen2.5-0.5B on sums"),
        ({"path": None, "new": {"architecture": "gpt2"}}, "a new gpt2 on sums"),
        ({"path": None, "new": None}, "a caller's model on sums"),
    ],
)
def test_the_page_begins_with_model_and_task(run, model, named):
    recipe = {"model": model, "task": {"type": "rows"}}
    run.config.write_text(yaml.safe_dump(recipe))
    assert named in Page(write_report(run.path).read_text()).text
    assert subject(recipe, ()) == named.replace("sums", "rows")


@pytest.mark.parametrize("text", ["", "a: [", "- a list"])
def test_a_damaged_recipe_leaves_a_page_of_the_rest(run, text):
    run.config.write_text(text)
    assert "Held-out accuracy" in Page(write_report(run.path).read_text()).text


def test_completions_are_those_of_the_last_step_whose_file_is_whole(run):
    newest = run.rollouts / "step_000040.jsonl"
    newest.write_text(newest.read_text()[:100])
    assert 39 in {group["step"] for group in groups_over_run(run)}
    assert 40 not in {group["step"] for group in groups_over_run(run)}


def test_curves_hold_the_metrics_of_their_stage_and_skip_what_was_never_finite(run):
    rows = [{"step": 1, "stage": "sft", "reward/mean": 9.0}]
    rows += [{"step": s, "stage": "train", "reward/mean": s / 2, "reward/std": 1.0, "reward/x": None} for s in (1, 2)]
    reward = next(chart for chart in CHARTS if chart.title == "Reward")
    curves = metric_curves(rows, reward)
    assert [(curve.label, list(curve.steps), list(curve.values)) for curve in curves] == [
        ("reward/mean", [1, 2], [0.5, 1.0])
    ]


def test_only_charts_with_something_to_show_are_drawn(run):
    text = write_report(run.path).read_text()
    titles = re.findall(r">([A-Z][A-Za-z -]+)</text>", text)
    assert titles == ["Held-out accuracy", "SFT loss", "Reward", "Entropy"]


def test_accuracy_starts_from_the_model_that_rl_began_with():
    [curve] = accuracy_curves(EVALUATIONS)
    assert list(curve.steps) == [0, 20, 40]
    assert list(curve.values) == [0.41, 0.9, 0.97]
    assert list(curve.intervals) == [(0.34, 0.48), (0.86, 0.94), (0.94, 0.99)]
    assert accuracy_curves(()) == []


def test_without_a_summary_evaluations_come_from_the_metrics():
    rows = [
        {"step": 0, "stage": "eval", "eval/sums/accuracy": 0.1},
        {"step": 1, "stage": "sft"},
        {"step": 1, "stage": "eval", "eval/sums/accuracy": 0.2, "eval/sums/pass@4": None},
        {"step": 1, "stage": "train"},
        {"step": 1, "stage": "eval", "eval/sums/accuracy": 0.3},
    ]
    result = evaluations_of(rows)
    assert [(one.stage, one.step, one.task, one.metrics["accuracy"]) for one in result] == [
        ("start", 0, "sums", 0.1),
        ("sft", 1, "sums", 0.2),
        ("train", 1, "sums", 0.3),
    ]
    assert result[1].metrics["pass@4"] is None


def test_a_run_that_has_only_begun_has_a_report_too(run):
    for path in (run.summary, run.metrics):
        path.unlink()
    for path in run.rollouts.iterdir():
        path.unlink()
    page = Page(write_report(run.path).read_text())
    assert "no summary yet" in page.text
    assert "Curves" not in page.text


def test_the_same_run_gives_the_same_page(run, monkeypatch):
    monkeypatch.setattr("flatpeak.report.charts.curve_svg", plain_curve_svg)
    first = write_report(run.path).read_text()
    assert write_report(run.path).read_text() == first


def test_charts_of_one_page_share_no_ids(run):
    rows = [{"step": s, "stage": "train", "reward/mean": s, "policy/entropy": s, "policy/grad_norm": s} for s in (1, 2)]
    drawn = charts(rows, EVALUATIONS)
    assert len(drawn) == 4
    # matplotlib names its groups alike in every figure (nothing refers to them); clip paths are referred to.
    clips = [set(re.findall(r'clipPath id="([^"]+)"', chart["svg"])) for chart in drawn]
    assert all(clips)
    assert len(set.union(*clips)) == sum(len(result) for result in clips)


def subset_row(size, accuracy, *, counted=None):
    return {
        "size": size,
        "metrics": {"accuracy": accuracy, "extraction_failed": 0.125},
        "intervals": {"accuracy": [accuracy / 2, min(1.0, 2 * accuracy)]},
        "methods": {"accuracy": "wilson"},
        "counted": {} if counted is None else {"accuracy": counted},
    }


def subset_table(values):
    micro = subset_row(200, 0.25)
    del micro["size"]
    return {"values": values, "micro": micro, "macro": {"accuracy": 0.375, "extraction_failed": 0.0625}}


TYPOS = {
    "asked": 200,
    "covered": 150,
    "counted": 149,
    "clean": 0.5,
    "clean_interval": [0.4, 0.6],
    "accuracy": 0.25,
    "interval": [0.2, 0.3],
    "difference": -0.25,
    "difference_interval": [-0.35, -0.15],
    "extraction_failed": 0.0625,
}


def page_of(run, last):
    write_summary(run.summary, replace(SUMMARY, evaluations=(*EVALUATIONS[:3], last)))
    page = Page(write_report(run.path).read_text())
    assert page.open == []
    return page.text


def test_the_page_has_the_tables_of_the_last_evaluation(run):
    last = replace(
        EVALUATIONS[3],
        metrics={"accuracy": 0.5, "extraction_failed": 0.125, "robustness/typos": 0.25},
        methods={"accuracy": "wilson", "extraction_failed": "wilson", "robustness/typos": "wilson"},
        counted={"accuracy": 198},
        intervals={"accuracy": (0.4, 0.6)},
        subsets={"level": subset_table({"Level 1": subset_row(60, 0.75, counted=59), "a<b": subset_row(140, 0.125)})},
        robustness={"typos": TYPOS},
    )
    text = page_of(run, last)
    for messages in (
        "Held-out accuracy after RL and at its best, step 40 0.500 [0.400, 0.600] of 198; no answer found in 12.5%",
        "accuracy answered right 0.000 0.410 [0.340, 0.480] 0.500 [0.400, 0.600] of 198 Wilson",
        "extraction_failed no answer found to grade 0.125 Wilson",
        "accuracy by level, after RL and at its best, step 40",
        "level questions accuracy no answer 0 to 1 Level 1 60 0.750 [0.375, 1.000] of 59 0.125",
        "a<b 140 0.125 [0.062, 0.250] 0.125",
        "all questions (micro) 200 0.250 [0.125, 0.500] 0.125 mean of the rows (macro) 0.375 0.062",
        "95% intervals: Wilson. No answer",
        "typos after RL and at its best, step 40 150 of 200 0.500 [0.400, 0.600] of 149 0.250 [0.200, 0.300] of 149 "
        "-0.250 [-0.350, -0.150] 0.062",
    ):
        assert messages in text
    assert "robustness/typos" not in text.partition("All 4 evaluations")[0]


def test_a_table_of_57_subjects_is_folded_and_sorted(run):
    values = {f"subject {index:02d}": subset_row(4, (index * 7 % 57) / 57) for index in range(57)}
    write_summary(
        run.summary,
        replace(SUMMARY, evaluations=(replace(EVALUATIONS[3], subsets={"subject": subset_table(values)}),)),
    )
    text = write_report(run.path).read_text()
    before, _, folded = text.partition("57 values, highest first")
    assert before.rstrip().endswith("<summary>")
    assert "mean of the rows (macro)" in before
    assert "<td>subject" not in before
    displayed = re.findall(r"<td>subject (\d\d)</td>", folded.partition("</details>")[0])
    assert len(displayed) == 57
    assert displayed == sorted(displayed, key=lambda name: int(name) * 7 % 57, reverse=True)


def test_an_evaluation_that_has_no_accuracy_is_told_by_what_chooses(run):
    last = replace(EVALUATIONS[3], metrics={"reward": 1.5, "style": 0.5}, intervals={"style": (0.25, 0.75)})
    write_summary(run.summary, replace(SUMMARY, metric="style", evaluations=(last,)))
    text = Page(write_report(run.path).read_text()).text
    assert "Held-out style after RL and at its best, step 40 0.500 [0.250, 0.750]" in text
    assert ">Held-out style</text>" in run.report.read_text()


def test_the_cost_of_judges_is_added_up(run):
    with MetricsWriter(run.metrics) as writer:
        for step in (41, 42):
            writer.write(step, "train", {"judge/cost": 0.75, "judge/style/cost": 0.5, "judge/valid_fraction": 1.0})
    text = write_report(run.path).read_text()
    assert "in the currency of their prices 2.50" in Page(text).text
    assert ">Judge: cost</text>" in text
    assert ">judge/style/cost</text>" in text


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(UserError, match="is not a run's directory"):
        write_report(tmp_path)


def test_the_table_has_a_row_per_run(run):
    assert run_table([run.path]) == (
        "run,status,task,questions,start_accuracy,sft_accuracy,final_accuracy,final_low,final_high,"
        "extraction_failed,metric,best_step,best_value,last_step,wall_seconds\n"
        f"{run.path},done,sums,200,0.0,0.41,0.97,0.94,0.99,,accuracy,40,0.97,40,117.6\n"
    )


def test_the_table_has_sampled_accuracy_where_there_are_no_greedy_answers(run):
    metrics = {"sampled/accuracy": 0.5, "sampled/extraction_failed": 0.125}
    sampled = summaries.evaluation("train", 3, intervals={"sampled/accuracy": (0.25, 0.75)}, **metrics)
    write_summary(run.summary, replace(SUMMARY, evaluations=(sampled,)))
    row = run_table([run.path]).splitlines()[1].split(",")
    assert row[6:10] == ["0.5", "0.25", "0.75", "0.125"]


def test_the_best_value_at_step_0_is_that_of_the_model_rl_began_with(run):
    write_summary(run.summary, summaries.summary(*EVALUATIONS[:2], best_step=0, last_step=0, signal=2))
    row = run_table([run.path]).splitlines()[1]
    assert row == f"{run.path},stopped,sums,200,0.0,0.41,0.41,0.34,0.48,,accuracy,0,0.41,0,117.6"


def test_several_runs_are_compared_in_a_table_for_the_terminal(run, tmp_path):
    other, bare = RunPaths(tmp_path / "other"), RunPaths(tmp_path / "bare")
    for paths in (other, bare):
        paths.path.mkdir()
    sampled = summaries.evaluation("train", 3, reward=-1.25, intervals={"reward": (-2.0, -0.5)})
    write_summary(
        other.summary, replace(SUMMARY, status="stopped", metric="reward", best_step=None, evaluations=(sampled,))
    )
    table = compared_runs([run.path, other.path, bare.path]).splitlines()
    assert table[0].split() == ["run", "metric", "start", "SFT", "final", "95%", "interval", "best", "last", "time"]
    first = "accuracy 0.000 0.410 0.970 [0.940, 0.990] 40 40 118 s"
    assert table[1].split() == [str(run.path), *first.split()]
    second = "(stopped) reward - - -1.250 [-2.000, -0.500] - 40 118 s"
    assert table[2].split() == [str(other.path), *second.split()]
    assert table[3].split() == [str(bare.path), "(no", "summary)", *("-" for _ in range(8))]
    ends = [line.rstrip().rfind(" s") for line in table[1:3]]
    assert ends[0] == ends[1] > 0
    values = max(map(len, table)) - len(f"{bare.path} (no summary)")
    assert values + len("runs/gsm8k") <= 80


def test_a_name_in_runs_is_suggested(run, tmp_path, monkeypatch):
    (tmp_path / "runs" / "x").mkdir(parents=True)
    (tmp_path / "runs" / "x" / "manifest.json").write_text(json.dumps({"versions": {"flatpeak": "0"}}))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"^x is not a run's directory: did you mean runs/x\?$"):
        write_report(Path("x"))
    with pytest.raises(UserError, match=r"x is not a run, or .* never began; did you mean runs/x\?$"):
        run_table([Path("x")])


def test_a_run_without_summary_has_no_row(run):
    run.summary.unlink()
    with pytest.raises(UserError, match=r"summary\.json does not exist"):
        run_table([run.path])


def test_a_report_needs_no_torch(run):
    code = (
        "import sys; from flatpeak.report.page import write_report; write_report(sys.argv[1]); "
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(run.path)], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_a_run_in_progress_gets_its_page_after_a_minute_and_then_in_a_hundredth_of_the_time(run, monkeypatch):
    now, written = [0.0], []

    def write(path):
        written.append(now[0])
        now[0] += 2.0  # seconds that the page takes
        if len(written) == 2:
            raise OSError("no space left")

    monkeypatch.setattr("flatpeak.report.page.write_report", write)
    live = LiveReport(run.path, clock=lambda: now[0])
    for second in (0.0, 59.0, 61.0, 100.0, 262.0, 264.0, 466.0):
        now[0] = max(now[0], second)
        live.refresh()
    assert written == [61.0, 264.0, 466.0]


def test_the_page_of_a_run_in_progress_reloads_itself_and_has_the_evaluations_so_far(run):
    write_summary(run.summary, replace(SUMMARY, status="running", evaluations=()))
    page = write_report(run.path).read_text()
    assert '<meta http-equiv="refresh"' in page
    assert "The run is not finished" in page
    assert "Held-out accuracy went from" in page
    write_summary(run.summary, SUMMARY)
    assert '<meta http-equiv="refresh"' not in write_report(run.path).read_text()


def test_a_manifest_that_was_cut_short_leaves_the_rest_of_the_page(tmp_path):
    MetricsWriter(tmp_path / "metrics.jsonl").write(1, "train", {"reward/mean": 0.5})
    write_summary(tmp_path / "summary.json", SUMMARY)
    (tmp_path / "manifest.json").write_text('{"started": "2026-01-01T00:00:00+00:00", "comm')
    page = write_report(tmp_path).read_text()
    assert "Held-out accuracy" in page
