"""Sweeps: many runs from one file, in parallel and resumable, with a table of the results and a line per run."""

from __future__ import annotations

import os
import selectors
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import yaml

from flatpeak.errors import UserError, duration
from flatpeak.experiments.cell_worker import WorkerProcess
from flatpeak.experiments.config import SweepConfig, read_sweep
from flatpeak.experiments.plan import Cell, PlannedRun, PrefixStep, SweepPlan, build_plan
from flatpeak.experiments.records import (
    CellRecord,
    affected,
    cell_state,
    changed_code_lines,
    check_functions,
    lost_rows,
    prune_checkpoints,
    read_record,
    refuse_changed,
    remove_cell,
    write_record,
)
from flatpeak.experiments.results import TableWriter
from flatpeak.runs.directory import RunLock
from flatpeak.runs.files import write_atomic
from flatpeak.runs.signals import StopSignals
from flatpeak.utils.redaction import redact
from flatpeak.utils.user_code import file_digest

Phase = Literal["waiting", "busy", "done", "failed", "stopped", "unneeded"]
"""The phase of a cell in this start of the sweep; a prefix step is unneeded if every run of its seed is done."""
SECONDS_BETWEEN_LOOKS = 0.5
"""The time between checks for signals and dead workers."""
_LOCK = ".lock"


@dataclass(frozen=True, kw_only=True)
class SweepResult:
    """The outcome of a sweep, or of one start of it."""

    path: Path
    """DIRECTORY/NAME, with runs/, prefix/, table.csv and table.json."""
    table: Path
    done: int
    failed: int
    stopped: int
    missing: int
    exit_code: int
    """0 if every run is done, 1 if some failed, 130 or 143 if a signal stopped the sweep."""


def run_sweep(
    sweep: SweepConfig | str | Path,
    *,
    settings: Sequence[str] = (),
    processes: int | None = None,
    skip_failed: bool = False,
    overwrite: bool = False,
    notice: Callable[[str], None] | None = None,
    command: Sequence[str] | None = None,
) -> SweepResult:
    """Run a sweep file, or continue it, and write its table.

    Finished runs stay, interrupted runs continue from their checkpoints, and failed runs are tried again unless
    `skip_failed`. A failed run never stops the others. Runs whose settings have changed are an error, and runs made
    with a user's file that has changed are reported; `overwrite` reruns both. `settings` are `key=value` changes to the
    sweep file; `notice` is called with a line per run, None writes them to stderr.
    Raises UserError before anything runs.
    """
    if isinstance(sweep, SweepConfig) and settings:
        raise UserError("settings change a sweep file: give its path, or a SweepConfig that has them already")
    config = sweep if isinstance(sweep, SweepConfig) else read_sweep(sweep, settings)
    plan = plan_sweep(config, processes)
    notice = notice or _print_line
    with _locked(plan.directory):
        if overwrite:
            doomed = affected(plan)
            for cell in doomed:
                check_functions(cell)
            for cell in reversed(doomed):  # a prefix step last: a kill in between must leave what says that it changed
                remove_cell(cell)
        refuse_changed(config.name, plan.by_seed)
        if lost := lost_rows(config):
            notice(f"table.csv leaves out earlier rows, of {lost}: their runs stay in {plan.directory / 'runs'}")
        for line in changed_code_lines(plan):
            notice(line)
        content = yaml.safe_dump(redact(config.model_dump(mode="json")), sort_keys=False, allow_unicode=True)
        write_atomic(plan.directory / "sweep.yaml", content)
        return _Sweep(plan, skip_failed=skip_failed, notice=notice, command=command).run()


def plan_sweep(config: SweepConfig, processes: int | None = None) -> SweepPlan:
    """The plan of a sweep, with one process per visible GPU if its runs use GPUs, unless `processes` is given."""
    plan = build_plan(config, processes=processes)
    gpus = len(visible_gpus(plan))
    return build_plan(config, processes=gpus) if gpus and processes is None else plan


def visible_gpus(plan: SweepPlan) -> list[str]:
    """The GPUs that the runs may use, as values of CUDA_VISIBLE_DEVICES; empty if all runs are on the CPU."""
    if all(run.recipe.model.device == "cpu" for run in plan.runs):
        return []
    import torch  # imported here because sweeps on the CPU need it only in their workers

    count = torch.cuda.device_count()
    listed = [one.strip() for one in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if one.strip()]
    return listed[:count] if listed else [str(index) for index in range(count)]


def _print_line(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """A context in which no second process works on the sweep's directory."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = RunLock(directory / _LOCK)
    except UserError:
        raise UserError(
            f"{directory}: another process works on this sweep; wait for it or stop it, or choose another name="
        ) from None
    except OSError as error:
        raise UserError(
            f"{directory} cannot be written ({error.strerror}): choose another directory= or name="
        ) from error
    try:
        yield
    finally:
        lock.release()


class _Sweep:
    """One start of a sweep: which cells wait, which worker runs which cell, and the results."""

    def __init__(
        self,
        plan: SweepPlan,
        *,
        skip_failed: bool,
        notice: Callable[[str], None],
        command: Sequence[str] | None,
    ) -> None:
        self.plan = plan
        self.command = list(command) if command is not None else ["flatpeak", "sweep"]
        self.cells = plan.by_seed
        self.phases: dict[str, Phase] = {}
        self.reasons: dict[str, str] = {}
        self.table = TableWriter(plan, command=self.command)
        self.progress = SweepProgress(plan, notice=notice)
        self.workers: list[WorkerProcess] = []
        self.busy: dict[int, Cell] = {}
        """The cell of each worker, by the worker's index."""
        self.selector = selectors.DefaultSelector()
        self.gpus = visible_gpus(plan)
        for cell in self.cells:
            self.phases[cell.label] = self._first_phase(cell, skip_failed=skip_failed)
            record = read_record(cell)
            if record is not None and record.status == "done":
                self.progress.observe(cell, record.seconds)
        needed = {run.seed for run in plan.runs if self.phases[run.label] == "waiting"}
        for step in plan.steps:
            if step.seed not in needed and self.phases[step.label] == "waiting":
                self.phases[step.label] = "unneeded"

    def _first_phase(self, cell: Cell, *, skip_failed: bool) -> Phase:
        state = cell_state(cell)
        if state.status == "done":
            if isinstance(cell, PlannedRun):
                prune_checkpoints(cell.path, keep=self.plan.config.keep)
            return "done"
        if state.status == "failed" and skip_failed:
            self.reasons[cell.label] = state.reason or "failed"
            return "failed"
        return "waiting"

    def run(self) -> SweepResult:
        """Work until no more cells can run, or a signal asks to stop; then write the table."""
        self.progress.begin(self.phases)
        interrupted = False
        with StopSignals() as stop:
            try:
                while True:
                    if stop.signal is None:
                        self._dispatch()
                    elif not interrupted:
                        interrupted = True
                        self.progress.notice("stopping: runs in progress save a checkpoint; once more to end at once")
                        for worker in self.workers:
                            if worker.index in self.busy:
                                worker.interrupt()
                    if not self.busy:
                        break
                    self._collect(stopping=stop.signal is not None)
            except KeyboardInterrupt:
                pass  # the second signal; the runs' last checkpoints are complete
            finally:
                self._close()
            self.table.write()
        return self._result(stop.exit_code)

    def _dispatch(self) -> None:
        """Give every idle worker the first cell that is ready; start workers as long as there is work for them."""
        while len(self.busy) < self.plan.processes:
            cell = self._next_ready()
            if cell is None:
                return
            idle = [worker for worker in self.workers if worker.index not in self.busy and worker.is_alive()]
            worker = idle[0] if idle else self._start_worker()
            if cell.call is not None:
                remove_cell(cell)  # the remains of an interrupted call
            code = None if cell.call is None else file_digest(cell.call)
            write_record(cell, CellRecord(status="started", prefix=cell.fingerprint, code=code))
            self.phases[cell.label] = "busy"
            self.busy[worker.index] = cell
            worker.send(self._job(cell))

    def _next_ready(self) -> Cell | None:
        """The first waiting cell whose prefix exists; on the way, cells whose prefix failed are marked as failed."""
        for cell in self.cells:
            if self.phases[cell.label] != "waiting":
                continue
            if cell.after is None or self.phases[cell.after.label] == "done":
                return cell
            if self.phases[cell.after.label] == "failed":
                reason = self.reasons[cell.after.label]
                if not reason.startswith("prefix step "):
                    reason = f"prefix step {cell.after.name} failed: {reason}"
                self._finish(cell, "failed", reason)
        return None

    def _start_worker(self) -> WorkerProcess:
        used = {worker.index for worker in self.workers}
        index = next(number for number in range(len(used) + 1) if number not in used)
        gpu = self.gpus[index % len(self.gpus)] if self.gpus else None
        worker = WorkerProcess(index, log=self.plan.directory / "logs" / f"worker-{index}.log", gpu=gpu)
        self.workers.append(worker)
        self.selector.register(worker.connection, selectors.EVENT_READ, worker)
        return worker

    def _job(self, cell: Cell) -> dict[str, Any]:
        return {
            "kind": cell.kind,
            "path": str(cell.path),
            "log": str(cell.log),
            "recipe": cell.written,
            "keep": self.plan.config.keep if isinstance(cell, PlannedRun) else "all",
            "report": self.plan.config.report,
            "command": self.command,
            "call": cell.call,
            "seed": cell.seed,
            "arguments": cell.arguments if isinstance(cell, PrefixStep) else {},
        }

    def _collect(self, *, stopping: bool) -> None:
        """Wait briefly for outcomes, and process those that arrive."""
        self.selector.select(timeout=SECONDS_BETWEEN_LOOKS)
        for worker in list(self.workers):
            try:
                outcome = worker.receive()
            except EOFError as death:
                self._drop(worker)
                outcome = {"status": "stopped" if stopping else "failed", "reason": str(death), "seconds": 0.0}
                if worker.index not in self.busy:
                    continue
            if outcome is None or worker.index not in self.busy:
                continue
            cell = self.busy.pop(worker.index)
            if outcome["status"] == "stopped" and not stopping:
                outcome["reason"] = "by a signal to its worker process"
            self._finish(cell, outcome["status"], outcome["reason"], seconds=outcome["seconds"])
            self.table.write_if_due()

    def _drop(self, worker: WorkerProcess) -> None:
        self.selector.unregister(worker.connection)
        self.workers.remove(worker)
        worker.kill()

    def _finish(
        self, cell: Cell, status: Literal["done", "failed", "stopped"], reason: str | None, *, seconds: float = 0.0
    ) -> None:
        """Record the outcome of a cell, on disk and in the display."""
        begun = read_record(cell) or CellRecord(status=status)
        record = replace(begun, status=status, reason=reason, prefix=cell.fingerprint, seconds=seconds)
        write_record(cell, record)
        if isinstance(cell, PlannedRun) and status != "failed" and cell_state(cell).status == "done":
            status = "done"
        self.phases[cell.label] = status
        if reason is not None:
            self.reasons[cell.label] = reason
        self.progress.finish(cell, status, reason=reason, seconds=seconds, phases=self.phases)

    def _close(self) -> None:
        """End all workers: idle ones exit by themselves, busy ones are killed."""
        for worker in self.workers:
            self.selector.unregister(worker.connection)
            if worker.index in self.busy:
                worker.kill()
                cell = self.busy.pop(worker.index)
                record = read_record(cell) or CellRecord(status="stopped", prefix=cell.fingerprint)
                write_record(cell, replace(record, status="stopped"))
                self.phases[cell.label] = "stopped"
            worker.close()
        self.workers.clear()
        self.selector.close()

    def _result(self, exit_code: int) -> SweepResult:
        counts = self.table.counts()
        unfinished = counts["failed"] + counts["stopped"] + counts["missing"]
        return SweepResult(
            path=self.plan.directory,
            table=self.table.path,
            done=counts["done"],
            failed=counts["failed"],
            stopped=counts["stopped"],
            missing=counts["missing"],
            exit_code=exit_code or int(unfinished > 0),
        )


class SweepProgress:
    """Lines about a sweep's cells, and the durations from which the time left is estimated."""

    def __init__(self, plan: SweepPlan, *, notice: Callable[[str], None]) -> None:
        self.plan = plan
        self.notice = notice
        self._seconds: dict[str, list[float]] = {}
        """Durations of finished cells, by arm or prefix step."""

    def begin(self, phases: Mapping[str, str]) -> None:
        """Print how much there is to do."""
        runs = len(self.plan.runs)
        done = sum(phases[run.label] == "done" for run in self.plan.runs)
        kept = f", {done} of them done" if done else ""
        processes = "1 process" if self.plan.processes == 1 else f"{self.plan.processes} processes"
        for line in self.plan.choices:
            self.notice(line)
        self.notice(f"sweep {self.plan.config.name}: {runs} runs{kept}, {processes}, in {self.plan.directory}")

    def observe(self, cell: Cell, seconds: float) -> None:
        """Record the duration of a finished cell, also from earlier starts of the sweep."""
        self._seconds.setdefault(cell.group, []).append(seconds)

    def finish(self, cell: Cell, status: str, *, reason: str | None, seconds: float, phases: Mapping[str, str]) -> None:
        """Print the outcome of a cell, the counts of runs, and the time left."""
        if status == "done":
            self.observe(cell, seconds)
        done, failed = (sum(phases[run.label] == kind for run in self.plan.runs) for kind in ("done", "failed"))
        left = len(self.plan.runs) - done - failed
        counts = f"{done} done" + (f", {failed} failed" if failed else "") + f", {left} left"
        expected = self.seconds_left(phases)
        time_left = "" if expected is None or not left else f", about {duration(expected)}"
        if status == "done":
            outcome = f"done in {seconds:.1f} s"
        else:
            outcome = f"{status}: {reason}" if reason else status
        self.notice(f"[{counts}{time_left}] {cell.label} {outcome}")

    def seconds_left(self, phases: Mapping[str, str]) -> float | None:
        """Seconds for all unfinished cells, each estimated by the mean duration of its arm or prefix step.

        An arm without finished runs counts as the mean of the others; None before the first run is finished.
        """
        means = {kind: fmean(values) for kind, values in self._seconds.items()}
        arms = [means[arm] for arm in self.plan.config.arms if arm in means]
        if not arms:
            return None
        mean = fmean(arms)
        waiting = [cell for cell in self.plan.by_seed if phases[cell.label] in ("waiting", "busy")]
        return sum(means.get(cell.group, mean) for cell in waiting) / self.plan.processes
