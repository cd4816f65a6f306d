"""The errors a user can meet. Each message says what was wrong, what was expected, and what to do.

Every class carries the exit code the command line ends with: 2 for bad input, 1 for a run that
failed. Anything that is not an `OutriderError` is a bug of ours and may print a traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path

GOT = ", got "  # before the value that a message is about

ADVICE = "weights_only"  # torch's, to read any pickle
CODE_INSIDE = "it is damaged, or a pickle of more than tensors, which could run code and is not read. Use a safetensors file"
SHOWN = 300  # characters of an error of transformers'


class OutriderError(Exception):
    """Base of all errors meant to be read by a person."""

    exit_code = 1


class ConfigError(OutriderError):
    """An option, parameter or name is wrong."""

    exit_code = 2


class CapabilityError(OutriderError):
    """The request is well formed but this model, cache or device cannot do it (say what can)."""

    exit_code = 2


class CheckpointError(OutriderError):
    """A checkpoint is missing, damaged or does not fit."""

    exit_code = 2


class RequestError(OutriderError):
    """One request is unusable: an empty prompt, a prompt longer than the context."""

    exit_code = 2


class QueueFullError(OutriderError):
    """The waiting queue is full; try again after `retry_after_s` seconds."""

    exit_code = 1

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class UnavailableError(OutriderError):
    """The engine takes no requests: it is ending, or has failed."""

    exit_code = 1


class ServerError(OutriderError):
    """A server that is measured cannot be reached, drops connections or answers what is no answer."""

    exit_code = 1


class NumericalError(OutriderError):
    """The model produced values that are no distribution (NaN, or everything masked)."""

    exit_code = 1


class DraftError(OutriderError):
    """A drafter proposed what is no draft: it, not the request, must be mended."""

    exit_code = 1


def install_hint(extra: str) -> str:
    """The command that adds what an extra brings: from a checkout, because no package index has
    Outrider."""
    return f"pip install '.[{extra}]' in a checkout of Outrider"


def in_words(error: Exception) -> str:
    """The message of an error, and the kind of one that is not ours."""
    return str(error) if isinstance(error, OutriderError) else f"{type(error).__name__}: {error}"


def without_values(error: BaseException) -> str:
    """An error's type, and its message as far as that cannot quote what a client sent: for logs,
    which hold no text of requests.

    Our own messages name the value at their end. Of others only those are shown that speak of the
    system or the device.
    """
    name = type(error).__qualname__
    match error:
        case OutriderError():
            message = str(error).partition(GOT)[0]
        case OSError(strerror=str()):
            message = f"[Errno {error.errno}] {error.strerror}"
        case RuntimeError() | MemoryError():  # torch's, mostly
            message = str(error)
        case _:
            return (
                f"{name} (its message is left out, since it may quote a request)"
                if str(error)
                else name
            )
    return f"{name}: {message}" if message else name


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """' Did you mean 'x'?' when something close exists, then the full list; ready to append to a
    message."""
    options = sorted(set(known))
    close = nearest(name, options)
    hint = f" Did you mean '{close}'?" if close else ""
    return f"{hint} Available: {', '.join(options)}."


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that `name` is probably a misspelling of."""
    # a client may send a name of megabytes
    alike = [candidate for candidate in sorted(known) if len(name) < 3 * len(candidate)]
    return next(iter(difflib.get_close_matches(name, alike, n=1)), None) if alike else None


def near_path(path: Path) -> str:
    """' Did you mean 'x'?' where something lies next to a path that is not there and has a name like
    its last part's."""
    try:
        close = nearest(path.name, [sibling.name for sibling in path.parent.iterdir()])
    except OSError:
        return ""
    return f" Did you mean '{path.parent / close}'?" if close else ""


def first_line(error: BaseException) -> str:
    """The first line of an error. A line that only announces the next one ("Validation error for
    field 'x':") takes it along."""
    if ADVICE in str(error):  # torch's, to read any pickle, which runs the code in it
        return CODE_INSIDE
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [
        type(error).__name__
    ]
    line = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return line if len(line) <= SHOWN else f"{line[: SHOWN - 1]}…"


def counted(number: int, thing: str) -> str:
    """The number and the thing, in the plural where it is not one."""
    ending = "" if number == 1 else "es" if thing.endswith("s") else "s"
    return f"{number} {thing}{ending}"
