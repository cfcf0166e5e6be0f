"""Any function over many items, in processes of their own."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import connection, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Generic, Literal, TypeVar

from theodolite.building import in_one_line
from theodolite.errors import UseError

RETRIES = 2
"""How often an item is tried again whose worker was lost."""

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Failure:
    """An item without a result."""

    reason: str
    """In one line."""
    trace: str
    """The traceback, where there is one."""


def pooled(
    function: Callable[[Item], Result],
    items: Sequence[Item],
    jobs: int,
    *,
    begun: Callable[[Item], None] = lambda item: None,
    said: Callable[[str], None] = lambda line: None,
    spent: Callable[[Result | Failure], bool] = lambda result: False,
) -> Generator[tuple[Item, Result | Failure], None, None]:
    """Every item with its result, in the order in which they end.

    An exception is the `Failure` of its item. A worker that dies takes only its item with it, which goes to
    another worker, `RETRIES` times at most. Closing the iterator kills all workers; they also end when the
    driver is killed. A Ctrl-C is the driver's to answer.

    Args:
        function: of a module, a partial of one, or any object that pickles.
        items: taken in their order.
        jobs: most processes at a time, one thread each.
        begun: called when an item is handed to a worker.
        said: called with a line when a worker was lost.
        spent: is a worker not to be used again that gave this result?
    """
    try:
        shipped = pickle.dumps(function)
    except UseError:
        raise
    except Exception as error:
        raise UseError(f"{function} cannot be sent to another process: {in_one_line(error)}") from error
    waiting = deque(_Task(item) for item in items)
    workers: list[_Worker[Item]] = []
    try:
        while waiting or any(worker.task for worker in workers):
            _hand_out(waiting, workers, jobs, begun)
            for worker in _ready(workers):
                task, (kind, content) = worker.task, worker.received(shipped)
                if kind == "refusal":
                    raise UseError(content)
                if kind == "loss":
                    workers.remove(worker)
                    lost = worker.ended()
                    if task is not None and task.tries < RETRIES:
                        said(f"{task.item}: {lost}. It is tried again")
                        waiting.appendleft(_Task(task.item, task.tries + 1))
                    elif task is not None:
                        yield task.item, Failure(f"{lost}, {RETRIES + 1} times", "")
                elif kind == "result":
                    assert task is not None
                    worker.task = None
                    if spent(content):
                        workers.remove(worker)
                        worker.kill()
                    yield task.item, content
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
            with _deaf_to_interrupts():  # also so that none is started and not in the list
                workers.append(idle := _Worker.started())
        task = waiting.popleft()
        idle.take(task)
        begun(task.item)


def _ready(workers: Sequence[_Worker[Item]]) -> list[_Worker[Item]]:
    """Wait until some of them have sent something, or have died."""
    signs = connection.wait([sign for worker in workers for sign in (worker.pipe, worker.process.sentinel)])
    return [worker for worker in workers if worker.pipe in signs or worker.process.sentinel in signs]


@dataclass
class _Worker(Generic[Item]):
    """A process as the driver sees it, and what it works on."""

    process: BaseProcess
    pipe: Connection
    is_ready: bool = False
    task: _Task[Item] | None = None

    @staticmethod
    def started() -> _Worker[Item]:
        # Fresh processes, not forked ones: CUDA does not survive a fork.
        context = multiprocessing.get_context("spawn")
        pipe, its_pipe = context.Pipe()
        process = context.Process(target=_work, args=(its_pipe,), daemon=True)
        process.start()
        its_pipe.close()  # with its own copy gone too, the pipe ends, which is how its death is seen
        return _Worker(process, pipe)

    def take(self, task: _Task[Item]) -> None:
        self.task = task
        if self.is_ready:
            self._send(pickle.dumps(task.item))

    def received(self, shipped: bytes) -> _Message:
        """What it has sent. It says first that it is ready; then it is sent the function, then items."""
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
                self._send(pickle.dumps(self.task.item))
        return message

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()

    def ended(self) -> str:
        """How a process that was lost has ended."""
        self.process.join()
        self.pipe.close()
        code = self.process.exitcode or 0
        if not self.is_ready and code > 0:
            raise UseError(
                f"a worker ended with exit code {code} before it had begun; its own words are above. In a "
                "script, start runs under `if __name__ == '__main__':`, or every worker starts them again"
            )
        if code >= 0:
            return f"its worker ended itself with exit code {code}"
        name = signal.Signals(-code).name
        return f"its worker was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")

    def _send(self, data: bytes) -> None:
        with suppress(OSError):  # it has died, which is seen where it is waited for
            self.pipe.send_bytes(data)


@contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    """A Ctrl-C goes to the whole group. What is started here never hears it, not even while it starts."""
    resource_tracker.ensure_running()  # which lifts the mask when it starts its process
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _work(pipe: Connection) -> None:
    """The life of a worker."""
    import torch

    torch.set_num_threads(1)
    driver = multiprocessing.parent_process()
    assert driver is not None
    threading.Thread(target=_end_with, args=(driver,), daemon=True).start()
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
