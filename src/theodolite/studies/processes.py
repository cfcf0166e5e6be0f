"""Cells of a study in processes of their own, one thread each."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing.process import BaseProcess
from typing import TypeVar

from theodolite.building import in_one_line

Cell = TypeVar("Cell")
Result = TypeVar("Result")


def run_cells(
    run: Callable[[Cell], Result], cells: Sequence[Cell], jobs: int
) -> Iterator[tuple[Cell, Result | str]]:
    """Every cell with its result, in the order in which they end; a text where it failed, which says why.

    `run` is a function of a module, or a partial of one: it is called in fresh processes. Several share one
    GPU. A single job needs no process of its own.
    """
    if jobs == 1:
        for cell in cells:
            yield cell, _attempt(run, cell)
        return
    if not cells:
        return
    # Fresh processes, not forked ones: CUDA does not survive a fork.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_start) as pool:
        waiting = {pool.submit(run, cell): cell for cell in cells}
        try:
            for future in as_completed(waiting):
                error = future.exception()
                yield waiting[future], in_one_line(error) if error else future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _attempt(run: Callable[[Cell], Result], cell: Cell) -> Result | str:
    try:
        return run(cell)
    except Exception as error:
        return in_one_line(error)


def _start() -> None:
    """One thread, and no life without the driver: a worker would wait for its next cell for ever."""
    import torch

    torch.set_num_threads(1)
    driver = multiprocessing.parent_process()
    assert driver is not None
    threading.Thread(target=_end_with, args=(driver,), daemon=True).start()


def _end_with(driver: BaseProcess) -> None:
    driver.join()
    os._exit(1)
