"""Runs as Ray tasks: on this machine, or on the nodes of a cluster."""

from __future__ import annotations

import dataclasses
import functools
import os
import pickle
import secrets
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from theodolite.core.building import in_one_line
from theodolite.core.errors import UseError
from theodolite.core.optional import needed
from theodolite.fleet.engine import Outcomes, Resources, attempt_in_worker, cost
from theodolite.fleet.isolation import ON_THIS_MACHINE, OwnSettings
from theodolite.fleet.pool import RETRIES
from theodolite.fleet.run import Outcome, Run
from theodolite.fleet.training import failed, settings_of, workload_of
from theodolite.workloads import Workload

_TOKEN = secrets.token_hex(32)
"""For clusters that this process starts; one for all, since Ray reads it once."""
LOOK_EVERY = 5.0
"""Seconds between questions whether the cluster has room for more."""


def ray_tasks(runs: Sequence[Run], resources: Resources) -> Outcomes:
    """Each run is a Ray task, the longest first.

    The cluster is the one this process is connected to, `resources.address`, the one that Ray finds
    (`RAY_ADDRESS`, or one on this machine), or a new one on this machine with room for `resources.jobs` runs,
    which ends with the last run. Its nodes need Theodolite; workloads of your own are sent to them.

    If a worker or node is lost, its run is tried again elsewhere. A run takes 1 CPU, and on `cuda` 1 GPU,
    unless `resources.per_run` says otherwise.
    """
    ray = needed("ray", "ray")
    usual = {"CPU": 1.0, "GPU": 1.0} if torch.device(resources.device).type == "cuda" else {"CPU": 1.0}
    needs = {**usual, **resources.per_run}
    with _cluster(ray, resources, needs):
        task = _task(ray, needs)
        shipped = {run.workload: ray.put(_shipped(run, resources)) for run in runs}
        # Ray shows a task only the card that it was given.
        here = dataclasses.replace(resources.for_worker(), device=torch.device(resources.device).type)
        waiting = deque(sorted(runs, key=cost, reverse=True))
        flying: dict[Any, tuple[Run, float]] = {}
        try:
            while waiting or flying:
                room = max(resources.jobs, _room(ray, needs))
                while waiting and len(flying) < room:
                    run = waiting.popleft()
                    flying[task.remote(run, shipped[run.workload], here)] = run, time.monotonic()
                    resources.begun(run)
                landed, _ = ray.wait(list(flying), timeout=LOOK_EVERY)
                for reference in landed:
                    run, start = flying.pop(reference)
                    yield _outcome(ray, reference, run, start, resources)
        finally:
            for reference in flying:
                with suppress(Exception):
                    ray.cancel(reference, force=True)


def _outcome(ray: Any, reference: Any, run: Run, start: float, resources: Resources) -> Outcome:
    try:
        outcome, lines = ray.get(reference)
    except ray.exceptions.RayTaskError as error:  # before our own code had begun
        reason = str(error)
    except ray.exceptions.RayError as error:
        reason = f"its Ray worker was lost {RETRIES + 1} times: {in_one_line(error)}"
    else:
        for line in lines:
            resources.said(line)
        return outcome
    return failed(run, reason, time.monotonic() - start, resources.device, "ray")


def _attempt(run: Run, shipped: bytes | None, resources: Resources) -> tuple[Outcome, tuple[str, ...]]:
    """The task."""
    try:
        workload, settings = (None, None) if shipped is None else _loaded(shipped)
    except Exception as error:
        raise UseError(
            f"workload {run.workload!r} did not arrive at a Ray worker: {in_one_line(error)}. Install what "
            "it imports there, or give path/to/file.py:name, which is sent with the files beside it"
        ) from error
    workloads = {} if workload is None else {run.workload: workload}
    outcome, lines = attempt_in_worker(run, workloads, resources, "ray", settings)
    if outcome.settled:
        resources.forget(run)  # on a node the folder may be another than the driver's
    return outcome, lines


@functools.lru_cache(maxsize=16)
def _loaded(shipped: bytes) -> tuple[Workload, OwnSettings]:
    """The same object for the same bytes, so that caches by workload work."""
    loaded: tuple[Workload, OwnSettings] = pickle.loads(shipped)
    return loaded


def _shipped(run: Run, resources: Resources) -> bytes | None:
    """The workload of a run with the code and settings of its file; None for built-in ones."""
    if run.workload not in resources.workloads and ":" not in run.workload:
        return None
    from ray import cloudpickle

    try:
        workload = workload_of(run.workload, resources.workloads)
    except UseError:  # the task will fail in the same way
        return None
    settings = {} if run.workload in resources.workloads else settings_of(run.workload)
    there = {name: value for name, value in settings.items() if name not in ON_THIS_MACHINE}
    beside = _modules_beside(run.workload)
    for module in beside:
        cloudpickle.register_pickle_by_value(module)
    try:
        data: bytes = cloudpickle.dumps((workload, there))
    except Exception as error:
        raise UseError(
            f"workload {run.workload!r} cannot be sent to Ray: {in_one_line(error)}. Make what its functions "
            "use inside of them, or take the engine 'serial'"
        ) from error
    finally:
        for module in beside:
            cloudpickle.unregister_pickle_by_value(module)
    return data


def _modules_beside(spec: str) -> list[ModuleType]:
    """The modules that another node cannot import: the file of a workload, and modules beside it."""
    file, _, _ = spec.rpartition(":")
    if not file.endswith(".py"):
        return []
    folder = Path(file).expanduser().resolve().parent
    found = []
    for name, module in list(sys.modules.items()):
        top, path = name.partition(".")[0], getattr(module, "__file__", None)
        if name == "__main__" or top == "theodolite" or not path:
            continue
        if Path(path).resolve().parent == folder or Path(path).is_relative_to(folder / top):
            found.append(module)
    return found


def _task(ray: Any, needs: Mapping[str, float]) -> Any:
    known = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
    options = {known[name]: amount for name, amount in needs.items() if name in known}
    others = {name: amount for name, amount in needs.items() if name not in known}
    try:
        return ray.remote(max_retries=RETRIES, resources=others, **options)(_attempt)
    except (ValueError, TypeError) as error:
        raise UseError(f"resources are {dict(needs)}, which Ray refuses: {error}") from error


def _room(ray: Any, needs: Mapping[str, float]) -> int:
    """How many runs the cluster can hold."""
    there = ray.cluster_resources()
    return int(min(there.get(name, 0.0) / amount for name, amount in needs.items() if amount > 0))


@contextmanager
def _cluster(ray: Any, resources: Resources, needs: Mapping[str, float]) -> Iterator[None]:
    """Connect to a cluster for the length of a block."""
    if ray.is_initialized():
        yield
        return
    quiet = {"logging_level": "ERROR", "log_to_driver": False}
    try:
        ray.init(resources.address or os.environ.get("RAY_ADDRESS") or "auto", **quiet)
        is_new = False
    except (ConnectionError, RuntimeError, ValueError) as error:
        address = resources.address or os.environ.get("RAY_ADDRESS")
        if address:
            raise UseError(f"there is no Ray cluster at {address}: {in_one_line(error)}") from error
        is_new = True
    with _private(ray) if is_new else nullcontext():
        try:
            if is_new:
                cpus = max(resources.jobs, 1) * needs.get("CPU", 1.0)
                ray.init("local", num_cpus=max(round(cpus), 1), include_dashboard=False, **quiet)
                if _room(ray, needs) < 1:
                    raise UseError(
                        f"a run needs {dict(needs)}, and Ray finds {ray.cluster_resources()} on this machine"
                    )
            yield
        finally:
            ray.shutdown()


@contextmanager
def _private(ray: Any) -> Iterator[None]:
    """Let a cluster that is started here listen on the loopback only, and ask for a token if Ray can.

    Whoever can talk to a Ray cluster can run code on it. Ray refuses loopback addresses, unless it believes
    that a cluster of several machines is impossible.
    """
    constants = ray._private.ray_constants
    several = constants.ENABLE_RAY_CLUSTER
    wanted = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": _TOKEN} if "RAY_AUTH_MODE" not in os.environ else {}
    wanted |= {constants.ENABLE_RAY_CLUSTERS_ENV_VAR: "0"}  # for the processes that Ray starts
    before = {name: os.environ[name] for name in wanted if name in os.environ}
    constants.ENABLE_RAY_CLUSTER = False
    os.environ.update(wanted)
    ray._raylet.Config.initialize("")  # reads RAY_AUTH_MODE again
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = several
        for name in wanted:
            os.environ.pop(name, None)
        os.environ.update(before)
        ray._raylet.Config.initialize("")
