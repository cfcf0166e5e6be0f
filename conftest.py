"""For all tests: one thread, the same seed, and data sets that may not be on this machine."""

from __future__ import annotations

import gc
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.forking import start_script
from tests.shared_anatomies import shared_anatomies

from theodolite import UseError, data
from theodolite.core.building import seed_generators

collect_ignore_glob = ["*/programs/*"]
"""Programs that tests run as processes of their own; importing one would run it."""

# Threads that wait for each other cost more than all the rest: in fixtures of a module, which come before
# those of a test, and in the processes that tests start.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["COLUMNS"] = "100"  # of whatever terminal the tests run in

# Importing makes a million objects and no garbage: to look through them again and again is a quarter of it.
# A test that builds and traces networks makes little more: by default a seventh of its time goes there.
gc.disable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest first, so that nobody waits for them at the end.

    With SHUFFLED=seed, another order of files, and of tests in a file: none may need another before it.
    """
    longest = ("test_docs.py", "test_ray_tasks.py", "test_workers.py")
    items.sort(key=lambda item: item.path.name not in longest)
    if seed := os.environ.get("SHUFFLED"):
        chance = random.Random(seed)
        places: dict[Path, float] = {}
        items.sort(key=lambda item: (places.setdefault(item.path, chance.random()), chance.random()))


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    gc.enable()


@pytest.fixture(autouse=True, scope="module")
def _imported_is_not_garbage() -> None:
    # To look through all of torch for garbage takes longer than most tests do.
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    # Networks this small lose more time to waiting threads than they win.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    seed_generators(0)


@pytest.fixture(scope="module")
def one_dissection() -> Iterator[None]:
    """Plans, runs and surveys of a network at a size share its anatomy: finding it is most of the time."""
    with shared_anatomies("planning.planner", "fleet.plans", "surveying.context", "surveying.trials"):
        yield


@pytest.fixture
def in_two_processes(tmp_path: Path) -> Callable[[Path], None]:
    """Run a program as ranks 0 and 1, its arguments a folder and the rank.

    Both have to print `done` last.
    """
    if not (dist.is_available() and dist.is_gloo_available()):
        pytest.skip("torch.distributed without gloo")

    def run(given: Path) -> None:
        program = tmp_path / "program.py"
        program.write_text(given.read_text(encoding="utf-8") + ENDING)
        printed = [tmp_path / f"printed by {rank}" for rank in range(2)]
        processes = [
            # Shards would go to a GPU, where gloo cannot use them.
            start_script(program, [str(tmp_path), str(rank)], printed[rank], {"CUDA_VISIBLE_DEVICES": ""})
            for rank in range(2)
        ]
        try:
            stalled = _stalled(processes)
        finally:
            for process in processes:
                process.kill()
                process.join()
        for rank, process in enumerate(processes):
            output = printed[rank].read_text()
            assert not stalled, f"both wait for ever; rank {rank} printed: {output}"
            assert process.exitcode == 0, output
            assert output.endswith("done\n"), output

    return run


ENDING = """
import os, sys
sys.stdout.flush()
os._exit(0)  # at once: torch's own teardown after DDP now and then aborts
"""


def _stalled(processes: Sequence[BaseProcess], patience: float = 120) -> bool:
    """Wait until all have ended. Do they wait for each other instead, and compute next to nothing?

    A machine that is busy with other work makes them slow, however slow, and is no reason to give up. A
    thread that waits for Python's lock looks for it 200 times a second: half a second in two minutes.
    """
    used, since = dict.fromkeys(processes, 0), time.monotonic()
    while any(process.is_alive() for process in processes):
        now = {process: _ticks(process) for process in processes}
        if any(now[process] > used[process] + 200 for process in processes):
            used, since = now, time.monotonic()
        if time.monotonic() - since > patience:
            return True
        time.sleep(0.05)
    return False


def _ticks(process: BaseProcess) -> int:
    """Hundredths of a second that a process has computed; where the system has no /proc, always more."""
    if not Path("/proc/self/stat").exists():
        return time.monotonic_ns()
    try:
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):  # it has ended and was waited for
        return 0
    return int(fields[11]) + int(fields[12])


@pytest.fixture
def need() -> Callable[[str], Path]:
    """Skip the test, with the command that fetches it, where a data set is missing."""

    def need(name: str) -> Path:
        try:
            return data.path(name)
        except UseError as error:
            pytest.skip(str(error).partition(". Or ")[0])

    return need
