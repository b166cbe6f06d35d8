"""`flatpeak push`: a run's checkpoint as a folder for the Hub, with card and recipe, without secrets or local paths."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import yaml

from flatpeak.apps.publish.export import check_new, locate_checkpoint, whole_or_absent
from flatpeak.apps.publish.hub_upload import check_repository_name, hub_token, upload
from flatpeak.apps.publish.model_card import RECIPE, UNKNOWN_LICENSE, CardSource, write_card
from flatpeak.config.load import parse_config
from flatpeak.errors import UserError, did_you_mean
from flatpeak.pipeline.model_source import locate_model, recipe_of
from flatpeak.pipeline.prompt_record import PROMPT_RECORD, PromptRecord, on_hub
from flatpeak.report.page import write_report
from flatpeak.runs.checkpoints import TRAINING_FILES
from flatpeak.runs.directory import RunPaths, run_hint
from flatpeak.runs.manifest import flatten
from flatpeak.runs.rollout_log import logged_steps
from flatpeak.runs.summary import read_summary
from flatpeak.utils.adapter_base import ADAPTER_CONFIG, named_base
from flatpeak.utils.redaction import HIDDEN, HIDDEN_DIRECTORY, is_key, local_roots, redact, without_local_paths

EXTRAS: Final = ("rollouts", "report")
"""The names that `--with` accepts."""
_CARD: Final = "README.md"
_SETTINGS: Final = re.compile(r"(?!(tokenizer|vocab|added_tokens)\.json$)(?!.*\.index\.json$).*\.json")
"""JSON files of a model that are settings; the others are vocabularies and indices, whose words are not paths."""
_TEXTS: Final = (".jinja", ".txt", ".md", ".py")
_STEP: Final = re.compile(r"step_(\d+)")


@dataclass(frozen=True, kw_only=True)
class FolderFile:
    """A file of the folder for the Hub."""

    name: str
    """Its path in the repository."""
    size: int
    """Its bytes."""


@dataclass(frozen=True, kw_only=True)
class Push:
    """A folder that was uploaded, or written by a dry run."""

    repo: str
    source: Path
    """The checkpoint that it was made from."""
    files: tuple[FolderFile, ...]
    address: str | None
    """The repository's page; None after a dry run."""
    directory: Path | None
    """The folder that a dry run has written."""
    local: tuple[str, ...] = ()
    """Keys of the recipe that name files by relative paths, which the folder lacks."""


@dataclass(frozen=True, kw_only=True)
class _Checkpoint:
    """A checkpoint to push, and the run that it belongs to."""

    path: Path
    run: RunPaths
    recipe: Mapping[str, Any]
    record: PromptRecord
    stage: Literal["sft", "train"]
    step: int


def push(
    run: str | Path,
    *,
    repo: str,
    checkpoint: str = "best",
    extras: Sequence[str] = (),
    private: bool = False,
    base_model: str | None = None,
    license: str = UNKNOWN_LICENSE,
    dry_run: str | Path | None = None,
    announce: Callable[[Sequence[FolderFile]], None] = lambda files: None,
) -> Push:
    """Upload a run's checkpoint to the Hub as `repo`, or write exactly that folder to `dry_run` without a network.

    The folder contains the model as `from_pretrained` loads it (adapters in peft's format), its record, a model card,
    the recipe, and `extras`: `rollouts`, `report`. `base_model` is the Hub name of a base that the recipe names by a
    directory. `announce` is called with the files before anything is uploaded. Raises UserError if the checkpoint
    cannot be pushed or the Hub refuses it, and `hub_upload.UploadError` if the upload may be repeated.
    """
    check_repository_name(repo)
    for name in extras:
        if name not in EXTRAS:
            raise UserError(f"--with {name}: choose among {', '.join(EXTRAS)}{did_you_mean(name, EXTRAS)}")
    token = hub_token() if dry_run is None else ""
    origin = _locate(str(run), checkpoint)
    if "rollouts" in extras and not logged_steps(origin.run.rollouts):
        raise UserError(f"--with rollouts: {run} has none (run.log_rollouts_every=0, or no step of RL): leave it out")
    writer = _FolderWriter(origin, repo=repo, base_model=base_model, license=license, token=token)
    if dry_run is not None:
        files = _write(writer, Path(dry_run), extras)
        announce(files)
        return Push(
            repo=repo, source=origin.path, files=files, address=None, directory=Path(dry_run), local=writer.local
        )
    with tempfile.TemporaryDirectory(prefix="flatpeak-push-") as temporary:
        try:
            paths = writer.write(Path(temporary), extras)
            files = _sizes(paths)
        except OSError as error:
            raise UserError(
                f"{origin.path} cannot be read ({error}): repeat the command, since a run that is going on may have "
                "deleted it, or free space"
            ) from error
        announce(files)
        message = f"Upload step {origin.step} of a flatpeak run"
        address = upload(paths, repo=repo, private=private, token=token, message=message)
    return Push(repo=repo, source=origin.path, files=files, address=address, directory=None, local=writer.local)


def _write(writer: _FolderWriter, target: Path, extras: Sequence[str]) -> tuple[FolderFile, ...]:
    """Write the whole folder to a new directory."""
    check_new(target)
    with whole_or_absent(target) as folder:
        paths = writer.write(folder, extras)
        for name, path in paths.items():
            if path != folder / name:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, folder / name)
        return _sizes(paths)


def _sizes(paths: Mapping[str, Path]) -> tuple[FolderFile, ...]:
    return tuple(FolderFile(name=name, size=path.stat().st_size) for name, path in sorted(paths.items()))


def _locate(name: str, checkpoint: str) -> _Checkpoint:
    """A run's checkpoint, or the one in a given directory, with links resolved; UserError without a run."""
    path = locate_checkpoint(name, checkpoint)
    source = locate_model(str(path))
    if source.run is None or source.recipe is None:
        hint = run_hint(name) or "; give a run, or upload a plain directory with hf upload"
        raise UserError(f"{name}: a model card is made of a run's files, and this belongs to no run{hint}")
    real = path.resolve()
    step = _STEP.fullmatch(real.name)
    if step is None:
        raise UserError(f"{real} is not a checkpoint of a run: name one by --checkpoint best, last, sft or a step")
    if source.record is None:
        raise UserError(f"{real} has lost its {PROMPT_RECORD}: push another checkpoint by --checkpoint")
    run = RunPaths(source.run)
    return _Checkpoint(
        path=real,
        run=run,
        recipe=recipe_of(source),
        record=source.record,
        stage="sft" if real.parent == run.sft_checkpoints.resolve() else "train",
        step=int(step[1]),
    )


class _FolderWriter:
    """Writes the folder for the Hub, without secrets and local paths."""

    def __init__(self, origin: _Checkpoint, *, repo: str, base_model: str | None, license: str, token: str) -> None:
        self.origin = origin
        self.repo = repo
        self.license = license
        self.config = parse_config(origin.recipe)
        self.roots = local_roots(origin.run.path, origin.run.path.parent, origin.path)
        self.secrets = _keys_of(self.config.model_dump(mode="json"))
        if token:
            self.secrets.append(token)
        self.adapter = (origin.path / ADAPTER_CONFIG).is_file()
        self.record = self._record(base_model)
        self.local: tuple[str, ...] = ()

    def write(self, folder: Path, extras: Sequence[str]) -> dict[str, Path]:
        """Write everything that is not uploaded unchanged, and map each name in the repository to its file."""
        paths: dict[str, Path] = {}
        for path in sorted(self.origin.path.rglob("*")):
            relative = path.relative_to(self.origin.path)
            if path.is_file() and relative.parts[0] not in (*TRAINING_FILES, PROMPT_RECORD, _CARD):
                changed = self._changed(path)
                if changed is not None:
                    path = folder / relative
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_text(changed, encoding="utf-8")
                paths[relative.as_posix()] = path
        recipe, needed = self._recipe()
        self.local = tuple(key for key, value in flatten(recipe).items() if _is_relative_file(key, value))
        text = yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True)
        (folder / RECIPE).write_text(text, encoding="utf-8")
        (folder / PROMPT_RECORD).write_text(self.record.as_text(), encoding="utf-8")
        (folder / _CARD).write_text(self._cleaned(self._card(needed)), encoding="utf-8")
        self._add(folder, extras)
        written = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
        return paths | written

    def _card(self, needed: tuple[str, ...]) -> str:
        run = self.origin.run
        summary = read_summary(run.summary) if run.summary.is_file() else None
        return write_card(
            CardSource(
                repo=self.repo,
                run_name=summary.name if summary else run.path.name,
                config=self.config,
                record=self.record,
                summary=summary,
                manifest=json.loads(run.manifest.read_text(encoding="utf-8")),
                folder=self.origin.path,
                stage=self.origin.stage,
                step=self.origin.step,
                adapter=self.adapter,
                license=self.license,
                needed=needed,
                local=self.local,
            )
        )

    def _record(self, base_model: str | None) -> PromptRecord:
        """The checkpoint's record with its base on the Hub, without secrets and local paths."""
        record = self.origin.record
        if base_model is not None:
            check_repository_name(base_model, option="--base-model")
            record = record.model_copy(update={"base_model": base_model, "base_revision": None})
        elif self.adapter and record.base_model is None:  # a caller's model, which itself knows its origin
            base, revision = on_hub(*named_base(self.origin.path, where="RUN"))
            record = record.model_copy(update={"base_model": base, "base_revision": revision})
        if self.adapter and record.base_model is None:
            raise UserError(
                f"{self.origin.path} holds adapters of a local base, which others do not have: name the "
                "same model on the Hub with --base-model OWNER/NAME, or merge them with flatpeak export"
            )
        return PromptRecord.model_validate(self._cleaned(record.model_dump(mode="json")))

    def _changed(self, path: Path) -> str | None:
        """The text of a model's settings to upload in place of a file; UserError if it contains a secret."""
        settings = _SETTINGS.fullmatch(path.name)
        if not settings and path.suffix not in _TEXTS:
            return None
        text = path.read_text(encoding="utf-8", errors="replace")
        if redact(text, secrets=self.secrets) != text:
            raise UserError(f"{path} holds a key or token, which is not uploaded: remove it from the model first")
        if not settings:
            return None
        content = json.loads(text)
        if path.name == ADAPTER_CONFIG:
            content["base_model_name_or_path"] = self.record.base_model
            content["revision"] = self.record.base_revision
        cleaned = without_local_paths(content, self.roots)
        return None if cleaned == json.loads(text) else json.dumps(cleaned, indent=2) + "\n"

    def _recipe(self) -> tuple[dict[str, Any], tuple[str, ...]]:
        """The recipe with its template as a text, and the keys whose values are left out."""
        whole = self.config.model_dump(mode="json")
        recipe: dict[str, Any] = self._cleaned(whole)
        if recipe["run"]["directory"] != whole["run"]["directory"]:
            recipe["run"]["directory"] = "runs"
        if self.record.base_model is not None and self._has_local_base():
            recipe["model"]["path"], recipe["model"]["revision"] = self.record.base_model, self.record.base_revision
        changed = [
            key
            for key, value in flatten(recipe).items()
            if isinstance(value, str) and (HIDDEN in value or value.startswith(f"{HIDDEN_DIRECTORY}/"))
        ]
        return recipe, tuple(changed)

    def _has_local_base(self) -> bool:
        """Whether the recipe's local path is exactly the model on the Hub, and not a model trained from it."""
        path = Path(self.config.model.path or "").expanduser()
        return self.config.model.path is not None and path.exists() and not (path / PROMPT_RECORD).is_file()

    def _add(self, folder: Path, extras: Sequence[str]) -> None:
        """Add the rollouts, and the report, which is written if it is missing."""
        run = self.origin.run
        added: list[Path] = []
        if "rollouts" in extras:
            added += logged_steps(run.rollouts).values()
        if "report" in extras:
            if not run.report.is_file():
                write_report(run.path)
            added.append(run.report)
        for path in added:
            target = folder / path.relative_to(run.path)
            target.parent.mkdir(exist_ok=True)
            with path.open(encoding="utf-8") as lines, target.open("w", encoding="utf-8") as file:
                file.writelines(self._cleaned(line) for line in lines)

    def _cleaned(self, value: Any) -> Any:
        return without_local_paths(redact(value, secrets=self.secrets), self.roots)


def _is_relative_file(key: str, value: Any) -> bool:
    """Whether a setting names a file or directory by a relative path, by its form or because it exists."""
    if not isinstance(value, str) or key.startswith(("run.", "tracking.")) or value.startswith(f"{HIDDEN_DIRECTORY}/"):
        return False
    if value.startswith(("./", "../")) or value.endswith(".py") or ".py:" in value:
        return len(value.splitlines()) == 1
    is_place = key.rpartition(".")[2].endswith(("path", "model", "tokenizer", "file"))
    try:
        return is_place and Path(value).exists()
    except (OSError, ValueError):  # a name that is too long, or contains a NUL
        return False


def _keys_of(recipe: dict[str, Any]) -> list[str]:
    """The values of the environment variables that a recipe names for its judges, under any name."""
    names = [value for key, value in flatten(recipe).items() if key.endswith("api_key_env") and value]
    return [value for name in names if is_key(value := os.environ.get(str(name), "").strip())]
