"""Data sets that may not be on this machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from theodolite import UseError, data


@pytest.fixture
def need() -> Callable[[str], Path]:
    """Skip the test, with the command that fetches it, where a data set is missing."""

    def need(name: str) -> Path:
        try:
            return data.path(name)
        except UseError as error:
            pytest.skip(str(error).splitlines()[0])

    return need
