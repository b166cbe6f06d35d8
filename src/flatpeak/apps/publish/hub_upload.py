"""The upload of files to the Hugging Face Hub, repeatable after an interruption, with errors that name the fix."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

from flatpeak.errors import RunError, UserError, brief
from flatpeak.utils.redaction import redact

MODEL_FILES: Final = (
    *("*.safetensors", "*.safetensors.index.json", "pytorch_model*", "config.json", "generation_config.json"),
    *("adapter_*", "reward_model.json"),
)
"""Files by which libraries see what a repository contains: none of an earlier push may stay next to new ones."""
_ADVICE: Final = {
    401: "the Hub refuses the token: make one with write access at {endpoint}/settings/tokens and set HF_TOKEN",
    403: "the token may not write to {owner}: use one with write access to it, or another --repo",
    404: "the Hub knows no user or organization {owner}, or the token does not see it: correct --repo",
    409: "the repository was changed at the same time: repeat the command",
    413: "a file is too large for the Hub: push an export in bfloat16, or without rollouts",
    429: "the Hub asks to wait: repeat the command later",
}
_REPEAT: Final = "repeat the command later; what is uploaded by then is not sent again"


class UploadError(RunError):
    """An upload failed; repeating the command continues it."""


def check_repository_name(repo: str, *, option: str = "--repo") -> None:
    """UserError if `repo`, the value of `option`, is not an `OWNER/NAME` that the Hub accepts."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    owner, slash, name = repo.partition("/")
    if not slash or not owner or not name or "/" in name:
        raise UserError(f"{option} {repo}: give it with its owner, as in {option} your-name/{name or owner or 'model'}")
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise UserError(f"{option} {repo}: {brief(error)}") from error


def hub_token() -> str:
    """The token of HF_TOKEN or of the Hub's own login. UserError if there is none, or if the Hub must not be used."""
    from huggingface_hub import constants, get_token

    if constants.HF_HUB_OFFLINE:
        raise UserError("HF_HUB_OFFLINE is set: unset it to push, or write the folder alone with --dry-run DIRECTORY")
    token = get_token()
    if not token:
        raise UserError(
            f"there is no token for {constants.ENDPOINT}: set HF_TOKEN to one with write access, or run hf auth login"
        )
    return token


def upload(paths: Mapping[str, Path], *, repo: str, private: bool, token: str, message: str) -> str:
    """Upload files by their names to a model repository, creating it if needed, and return its address.

    Files that the Hub already has are not sent again, so a repeated call continues an interrupted upload. Weights of an
    earlier push that are not among the files are deleted in the same commit. UserError if the Hub refuses, UploadError
    if it cannot be reached or fails.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    for path in paths.values():
        if not path.is_file():
            raise UploadError(f"{path} is gone: repeat the command, since a run that is going on may have deleted it")
    api = HfApi(token=token)
    with _hub_errors(repo):
        address = str(api.create_repo(repo, private=private or None, exist_ok=True))
        if private and not api.repo_info(repo).private:
            raise UserError(
                f"{address} exists and is public: make it private in its settings first, or choose another --repo"
            )
        stale = [name for name in api.list_repo_files(repo) if name not in paths and _is_model(name)]
        operations: list[CommitOperationAdd | CommitOperationDelete] = [
            CommitOperationAdd(path_in_repo=name, path_or_fileobj=path) for name, path in paths.items()
        ]
        operations += [CommitOperationDelete(path_in_repo=name) for name in stale]
        api.create_commit(repo, operations, commit_message=message)
    return address


def _is_model(name: str) -> bool:
    return "/" not in name and any(fnmatchcase(name, pattern) for pattern in MODEL_FILES)


@contextmanager
def _hub_errors(repo: str) -> Iterator[None]:
    """A context in which the client's errors become one line that names the fix."""
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError

    try:
        yield
    except UserError:
        raise
    except ValueError as error:  # from the card's metadata, such as an unknown license
        raise UserError(f"{repo}: the Hub refuses the files: {redact(brief(error))}") from error
    except Exception as error:  # the client's HTTP library may change, and with it the types of errors
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, HfHubHTTPError):  # raised in a thread that uploads
            cause = cause.__cause__
        if cause is not None:
            raise _refusal(cause, repo) from error
        reason = redact(brief(error))
        raise UploadError(f"{constants.ENDPOINT}: the upload was interrupted ({reason}); {_REPEAT}") from error


def _refusal(error: Any, repo: str) -> UserError:
    from huggingface_hub import constants

    status = error.response.status_code
    owner = repo.partition("/")[0]
    if status in _ADVICE:
        kind = UploadError if status in (409, 429) else UserError
        return kind(f"{repo} ({status}): {_ADVICE[status].format(endpoint=constants.ENDPOINT, owner=owner)}")
    if status >= 500:
        return UploadError(f"{repo}: the Hub fails ({status}); {_REPEAT}")
    return UserError(f"{repo}: the Hub refuses ({status}): {redact(brief(error))}")
