"""A pool of processes that apply a function to many items."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import connection, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from typing import Any, Generic, Literal, TypeVar

from theodolite.core.building import in_one_line
from theodolite.core.errors import UseError

RETRIES = 2
"""How often an item is tried again if its worker was killed."""
PRELOADED = ["theodolite.fleet.engine", "torch._dynamo"]
"""Imported once for all workers. Training imports torch._dynamo, which takes a second."""

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Failure:
    """An item without a result."""

    reason: str
    """In one line."""
    trace: str = ""
    """The traceback, where there is one."""


def pooled(
    function: Callable[[Item], Result],
    items: Sequence[Item],
    jobs: int,
    *,
    begun: Callable[[Item], None] = lambda item: None,
    said: Callable[[str], None] = lambda line: None,
    spent: Callable[[Result | Failure], bool] = lambda result: False,
    timeout: float | None = None,
) -> Generator[tuple[Item, Result | Failure], None, None]:
    """Every item with its result, in the order in which they end.

    An exception is the `Failure` of its item, and so is a worker that exits by itself. An item whose worker
    was killed, as the system does to free memory, is tried again after the others, alone, at most `RETRIES`
    times. Closing the iterator kills all workers; they also end when the driver is killed. Only the driver
    answers to Ctrl-C.

    Args:
        function: of a module, a partial of one, or any object that pickles.
        items: taken in their order.
        jobs: most processes at a time, one thread each.
        begun: called when an item is handed to a worker.
        said: called with a message when a worker was lost.
        spent: given a result, must its worker be replaced?
        timeout: seconds after which an item without a result is a `Failure`, its worker killed.
    """
    try:
        shipped = pickle.dumps(function)
    except UseError:
        raise
    except Exception as error:
        raise UseError(f"{function} cannot be sent to another process: {in_one_line(error)}") from error
    waiting = deque(_Task(item) for item in items)
    lost: deque[_Task[Item]] = deque()
    workers: list[_Worker[Item]] = []
    try:
        while waiting or lost or any(worker.task for worker in workers):
            if not waiting and lost and not any(worker.task for worker in workers):
                waiting.append(lost.popleft())
            _hand_out(waiting, workers, jobs, begun)
            for worker in _ready(workers, timeout):
                task, (kind, content) = worker.task, worker.received(shipped)
                if kind == "refusal":
                    raise UseError(content)
                if kind == "loss":
                    workers.remove(worker)
                    end, was_killed = worker.ended()
                    if task is None:
                        continue
                    if was_killed and task.tries < RETRIES:
                        said(f"{task.item}: {end}. It is tried again alone, after the others")
                        lost.append(_Task(task.item, task.tries + 1))
                    else:
                        yield task.item, Failure(f"{end}, {RETRIES + 1} times" if was_killed else end)
                elif kind == "result":
                    assert task is not None
                    worker.task = None
                    if spent(content):
                        workers.remove(worker)
                        worker.kill()
                    yield task.item, content
            for worker in [worker for worker in workers if worker.is_late(timeout)]:
                assert worker.task is not None
                workers.remove(worker)
                worker.kill()
                yield worker.task.item, Failure(f"it was ended after {timeout:g} s, the time limit")
    finally:
        for worker in workers:
            worker.process.kill()
        for worker in workers:
            worker.kill()


@dataclass(frozen=True)
class _Task(Generic[Item]):
    item: Item
    tries: int = 0


_Message = tuple[Literal["nothing", "ready", "refusal", "result", "loss"], Any]


def _hand_out(
    waiting: deque[_Task[Item]], workers: list[_Worker[Item]], jobs: int, begun: Callable[[Item], None]
) -> None:
    while waiting:
        idle = next((worker for worker in workers if worker.task is None), None)
        if idle is None and len(workers) >= jobs:
            return
        if idle is None:
            with _deaf_to_interrupts():  # nor is a worker started and not in the list
                workers.append(idle := _Worker.started())
        task = waiting.popleft()
        idle.take(task)
        begun(task.item)


def _ready(workers: Sequence[_Worker[Item]], timeout: float | None) -> list[_Worker[Item]]:
    """Wait until some have sent something, have died, or are out of time."""
    since = [worker.since for worker in workers if worker.since is not None]
    left = None if timeout is None or not since else max(min(since) + timeout - time.monotonic(), 0.0)
    signs = connection.wait(
        [sign for worker in workers for sign in (worker.pipe, worker.process.sentinel)], left
    )
    return [worker for worker in workers if worker.pipe in signs or worker.process.sentinel in signs]


@dataclass
class _Worker(Generic[Item]):
    """A process as the driver sees it, and what it works on."""

    process: BaseProcess
    pipe: Connection
    is_ready: bool = False
    task: _Task[Item] | None = None
    since: float | None = None
    """When it was sent the item that it works on."""

    @staticmethod
    def started() -> _Worker[Item]:
        context = _context()
        pipe, its_pipe = context.Pipe()
        process = context.Process(target=_work, args=(its_pipe, dict(os.environ)), daemon=True)
        process.start()
        its_pipe.close()  # so that the pipe ends when the worker dies
        return _Worker(process, pipe)

    def take(self, task: _Task[Item]) -> None:
        self.task = task
        if self.is_ready:
            self._begin(task)

    def received(self, shipped: bytes) -> _Message:
        """What it has sent: first that it is ready, upon which it gets the function; then results."""
        try:
            if not self.pipe.poll():  # what it sent before it died is read first
                return ("nothing" if self.process.is_alive() else "loss"), None
            message: _Message = self.pipe.recv()
        except (EOFError, OSError):
            return "loss", None
        if message[0] == "ready":
            self.is_ready = True
            self._send(shipped)
            if self.task is not None:
                self._begin(self.task)
        elif message[0] == "result":
            self.since = None
        return message

    def is_late(self, timeout: float | None) -> bool:
        return timeout is not None and self.since is not None and time.monotonic() >= self.since + timeout

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()

    def ended(self) -> tuple[str, bool]:
        """How a lost process has ended, and whether it was killed."""
        self.process.join()
        self.pipe.close()
        code = self.process.exitcode or 0
        if not self.is_ready and code > 0:
            raise UseError(
                f"a worker ended with exit code {code} before it had begun; its own words are above. In a "
                "script, start runs under `if __name__ == '__main__':`, or every worker starts them again"
            )
        if code >= 0:
            return f"its worker ended itself with exit code {code}", False
        name = signal.Signals(-code).name
        return f"its worker was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else ""), True

    def _begin(self, task: _Task[Item]) -> None:
        self._send(pickle.dumps(task.item))
        self.since = time.monotonic()

    def _send(self, data: bytes) -> None:
        with suppress(OSError):  # it has died, which is seen where it is waited for
            self.pipe.send_bytes(data)


@contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    """Processes that are started in here never get a Ctrl-C, which goes to the whole group."""
    resource_tracker.ensure_running()  # which lifts the mask when it starts its process
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _context() -> ForkServerContext | SpawnContext:
    """Where workers come from: on Linux a process that has imported torch forks them, else fresh processes.

    That process never touches a GPU, as CUDA does not survive a fork.
    """
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    # The system ends that process with the thread that started it, so that has to be the main one.
    is_main = threading.current_thread() is threading.main_thread()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["theodolite.fleet.lifeline"] * is_main + PRELOADED)
    return context


def _work(pipe: Connection, environment: Mapping[str, str]) -> None:
    """The main function of a worker, in the environment variables of its driver."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.clear()
    os.environ.update(environment)
    driver = multiprocessing.parent_process()
    assert driver is not None
    threading.Thread(target=_end_with, args=(driver,), daemon=True).start()
    import torch

    torch.set_num_threads(1)
    pipe.send(("ready", None))
    try:
        function = pickle.loads(pipe.recv_bytes())
    except Exception as error:
        pipe.send(("refusal", str(error) if isinstance(error, UseError) else in_one_line(error)))
        return
    while True:
        pipe.send_bytes(_answer(function, pickle.loads(pipe.recv_bytes())))


def _answer(function: Callable[[Item], Result], item: Item) -> bytes:
    try:
        return pickle.dumps(("result", function(item)))
    except (Exception, SystemExit) as error:
        return pickle.dumps(("result", Failure(in_one_line(error), traceback.format_exc())))


def _end_with(driver: BaseProcess) -> None:
    driver.join()
    os._exit(1)
