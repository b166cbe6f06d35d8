"""Models in GGUF files: dequantized once to float32, into a directory of the user's cache."""

from __future__ import annotations

import hashlib
import io
import os
from contextlib import redirect_stderr
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from flatpeak.errors import UserError, brief

SUFFIX: Final = ".gguf"
_LISTED: Final = 8
"""The most files that an error lists."""


def names_hub_file(path: str) -> bool:
    """Whether a name is that of a GGUF file on the Hub, `ORGANIZATION/REPOSITORY/FILE.gguf`, and not a local file."""
    hub = path.count("/") == 2 and not path.startswith((".", "/", "~"))
    return path.endswith(SUFFIX) and hub and not Path(path).is_file()


def find_gguf(path: str, *, revision: str | None = None) -> Path | None:
    """The GGUF file that `model.path` names; None if it names another kind of model.

    A directory or Hub repository may be named if it has exactly one such file and no config.json. UserError for several
    files, and for a missing file.
    """
    local = Path(path).expanduser()
    if local.is_dir():
        return None if (local / "config.json").is_file() else _only(path, sorted(local.glob(f"*{SUFFIX}")))
    if local.is_file():
        return local if local.suffix == SUFFIX else None
    if names_hub_file(path):
        from huggingface_hub import hf_hub_download

        repository, _, name = path.rpartition("/")
        return Path(hf_hub_download(repository, name, revision=revision))
    if path.count("/") == 1 and SUFFIX[1:] in path.lower() and not path.startswith((".", "~")):
        return _find_on_hub(path, revision)
    return None


def _find_on_hub(repository: str, revision: str | None) -> Path | None:
    from huggingface_hub import constants, hf_hub_download, list_repo_files, snapshot_download

    if constants.HF_HUB_OFFLINE:
        return find_gguf(snapshot_download(repository, revision=revision, local_files_only=True))
    names = [Path(name) for name in list_repo_files(repository, revision=revision)]
    file = _only(repository, [name for name in names if name.suffix == SUFFIX])
    if file is None or Path("config.json") in names:
        return None
    return Path(hf_hub_download(repository, str(file), revision=revision))


def _only(place: str, files: list[Path]) -> Path | None:
    if len(files) > 1:
        listed = ", ".join(file.name for file in files[:_LISTED]) + (", ..." if len(files) > _LISTED else "")
        raise UserError(f"{place} has {len(files)} GGUF files: name one, as {place}/{files[0].name} ({listed})")
    return files[0] if files else None


def dequantized(file: Path) -> Path:
    """The directory with a GGUF file's model in float32 and its tokenizer; created if it is not in the cache.

    It takes 4 bytes per weight. UserError if a package is missing, the file cannot be read, or the cache cannot be
    written.
    """
    directory = cache_directory(file)
    home = directory.parent
    if not directory.is_dir():
        try:
            home.mkdir(parents=True, exist_ok=True)
            with TemporaryDirectory(dir=home) as scratch:
                made = Path(scratch) / "model"
                _convert(file, made)
                made.rename(directory)
        except OSError as error:
            if error.errno is None:  # raised by transformers itself
                raise
            if not directory.is_dir():  # otherwise another process has created it
                raise UserError(_unwritable(home, brief(error))) from error
    return directory


def _unwritable(home: Path, reason: str) -> str:
    return f"its weights in float32 cannot be written to {home} ({reason}): make room there, or set XDG_CACHE_HOME"


def cache_directory(file: Path) -> Path:
    """The cache directory for a GGUF file's model."""
    import transformers

    facts = file.stat()
    origin = f"{file.resolve()} {facts.st_size} {facts.st_mtime_ns} transformers {transformers.__version__}"
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    except RuntimeError as error:
        raise UserError("this user has no home for the weights of a GGUF file: set XDG_CACHE_HOME") from error
    return home / "flatpeak" / "gguf" / f"{file.stem}-{hashlib.sha256(origin.encode()).hexdigest()[:16]}"


def _convert(file: Path, directory: Path) -> None:
    from transformers import __version__
    from transformers.utils import is_accelerate_available, is_gguf_available

    if not (is_gguf_available() and is_accelerate_available()):
        raise UserError('a GGUF file needs the packages gguf and accelerate: pip install "flatpeak[gguf]"')
    try:
        with redirect_stderr(io.StringIO()):  # progress bars would overwrite the run's display
            _read_and_save(file, directory)
    except (ValueError, KeyError, IndexError, NotImplementedError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"{brief(error)}: the file is cut short, or its quantization or architecture is one that transformers "
            f"{__version__} does not read"
        ) from error


def _read_and_save(file: Path, directory: Path) -> None:
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    model, report = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32, output_loading_info=True)
    if missing := sorted(report["missing_keys"]):
        raise UserError(
            f"{file.name} lacks weights of {type(model).__name__} ({', '.join(missing[:3])}); merge a file of several "
            "parts first (llama-gguf-split --merge)"
        )
    # The saved weights are plain; with this setting, loaders would look for quantized weights.
    del model.config.quantization_config
    model.hf_quantizer = None
    try:
        model.save_pretrained(directory)
    except SafetensorError as error:  # for example because of a full disk
        raise UserError(_unwritable(directory.parents[1], brief(error))) from error
    tokenizer.save_pretrained(directory)
