"""For all tests: one thread, the same seed, and data sets that may not be on this machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from theodolite import UseError, data

# Threads that wait for each other cost more than all the rest: in fixtures of a module, which come before
# those of a test, and in the processes that tests start.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    # Networks this small lose more time to waiting threads than they win.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def need() -> Callable[[str], Path]:
    """Skip the test, with the command that fetches it, where a data set is missing."""

    def need(name: str) -> Path:
        try:
            return data.path(name)
        except UseError as error:
            pytest.skip(str(error).splitlines()[0])

    return need
