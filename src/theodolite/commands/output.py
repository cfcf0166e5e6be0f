"""Standard output belongs to the results of a command, also where user code prints."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import TextIO

_results: TextIO | None = None
"""Where results go while standard output is kept for them."""


def print_result(result: object, *, end: str = "\n") -> None:
    """Print what the command was called for."""
    print(result, end=end, file=_results, flush=_results is not None)


@contextlib.contextmanager
def only_results() -> Iterator[None]:
    """Send all that is printed meanwhile to standard error, except through `print_result`.

    This holds for Python, for libraries that write to the file descriptor, and for processes started here.
    """
    global _results
    with contextlib.ExitStack() as stack:
        results = sys.stdout
        if (real := _own_descriptor(results)) is not None:
            results = stack.enter_context(real)
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        before, _results = _results, results
        try:
            yield
        finally:
            _results = before


@contextlib.contextmanager
def _redirected(stream: TextIO, kept: int) -> Iterator[TextIO]:
    """Point descriptor 1 at standard error; gives a stream to where it pointed before."""
    with os.fdopen(kept, "w", encoding=stream.encoding, errors=stream.errors) as results:
        os.dup2(2, 1)
        try:
            yield results
        finally:
            results.flush()
            os.dup2(kept, 1)


def _own_descriptor(stream: TextIO) -> contextlib.AbstractContextManager[TextIO] | None:
    """A redirection of descriptor 1, if the stream writes there and there is a standard error."""
    try:
        if stream.fileno() != 1:
            return None
        os.fstat(2)
        stream.flush()
        return _redirected(stream, os.dup(1))
    except (OSError, ValueError, AttributeError):  # replaced by an object that is no file, or closed
        return None
