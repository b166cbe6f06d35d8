"""What cannot work, said in one line that names the fix; and that a run was asked to stop."""

import textwrap

LONGEST_REASON = 300
"""Characters of another library's message that are repeated in a line of ours."""


class UserError(ValueError):
    """Bad input: a recipe, a file, a model or an argument. The message says what to change."""


class RunError(UserError):
    """A run that had begun well cannot go on. Its last checkpoint is whole."""


class StoppedError(Exception):
    """A signal asked to stop while something was waited for; nothing of what was waited for is kept."""


DIVERGED = (
    "fork the run from an earlier checkpoint with a lower optimizer.learning_rate: flatpeak fork RUN STEP --name NEW "
    "optimizer.learning_rate=..."
)
"""The advice in every error about diverged weights."""


class DivergedError(RunError):
    """The weights have diverged: they are no checkpoint to go on from."""


_EXPLAINED = "flatpeak: "
"""Before the notes that `explain` adds."""


def explain(error: Exception, text: str) -> None:
    """Say in one line what an unexpected error means, where its traceback is kept elsewhere."""
    error.add_note(_EXPLAINED + text)


def explanation(error: Exception) -> str | None:
    """That line, if there is one."""
    notes = getattr(error, "__notes__", [])
    return next((note.removeprefix(_EXPLAINED) for note in notes if note.startswith(_EXPLAINED)), None)


def brief(error: BaseException) -> str:
    """The first paragraph of an error's message as one line: a first line alone may end before it has said anything."""
    line = " ".join(str(error).strip().split("\n\n")[0].split())
    return textwrap.shorten(line, LONGEST_REASON, placeholder=" ...") or type(error).__name__
