"""Standard output belongs to the results of a command, also where user code prints."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from theodolite.planning.exporting import Exported

_results: TextIO | None = None
"""Where results go while standard output is kept for them."""


def print_result(result: object, *, end: str = "\n") -> None:
    """Print what the command was called for."""
    print(result, end=end, file=_results, flush=_results is not None)


def print_export(made: Exported, out: Path | None) -> None:
    """Print the text for another trainer, or save it; notes go to standard error."""
    for note in made.notes:
        print(note, file=sys.stderr)
    if out is None:
        print_result(made)
    else:
        print(f"The export for {made.format} is {made.save(out)}", file=sys.stderr)


@contextlib.contextmanager
def only_results() -> Iterator[None]:
    """Send all that is printed meanwhile to standard error, except through `print_result`.

    This holds for Python, for libraries that write to the file descriptor, and for processes started here.
    """
    global _results
    stream, before = sys.stdout, _results
    kept = _kept_descriptor(stream)
    _results = stream
    if kept is not None:
        _results = os.fdopen(kept, "w", encoding=stream.encoding, errors=stream.errors)
        os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        if kept is not None:
            _results.flush()
            os.dup2(kept, 1)
            _results.close()
        _results = before


def _kept_descriptor(stream: TextIO) -> int | None:
    """A copy of descriptor 1, if the stream writes there and there is a standard error."""
    try:
        if stream.fileno() != 1:
            return None
        os.fstat(2)
        stream.flush()
        return os.dup(1)
    except (OSError, ValueError, AttributeError):  # replaced by an object that is no file, or closed
        return None
