"""Data sets that may not be on this machine, and one thread: these networks are too small for more."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

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


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
