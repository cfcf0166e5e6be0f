"""Public calls in several threads at once, on one network and on several with dropout."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from . import calls
from .attack import Attack

THREADS = 4
EVERY = {**calls.PROBES, **calls.OTHERS}


def _one_network(count: int, folder: Path) -> Iterator[str | None]:
    names = calls.UNCHANGED
    pairs = [("dissect", "dissect"), ("curvature", "curvature"), *itertools.combinations(names, 2)]
    for number in range(count):
        chosen = pairs[number % len(pairs)] * (THREADS // 2)
        model = calls.network()
        held = list(model.named_parameters())
        values = [parameter.detach().clone() for _, parameter in held]
        fault = _at_once(chosen, [model] * len(chosen))
        now = list(model.named_parameters())
        if fault is None and not all(mine[1] is other[1] for mine, other in zip(held, now, strict=True)):
            kinds = {type(parameter).__name__ for _, parameter in now}
            fault = f"{chosen}: the network holds other parameters, of type {', '.join(kinds)}"
        weights = [parameter.detach() for _, parameter in held]
        if fault is None and not all(map(torch.equal, values, weights)):
            fault = f"{chosen}: the weights are others"
        yield fault


def _own_networks(count: int, folder: Path) -> Iterator[str | None]:
    names = list(EVERY)
    for number in range(count):
        chosen = [names[(number + 11 * thread) % len(names)] for thread in range(THREADS)]
        yield _at_once(chosen, [calls.network() for _ in chosen])


def _at_once(names: Sequence[str], models: Sequence[nn.Module]) -> str | None:
    """Make the calls at the same time, each in a thread of its own, and compare with what they give alone."""
    wanted = [calls.expected(name) for name in names]
    faults: list[str] = []
    start = threading.Barrier(len(names))

    def act(name: str, model: nn.Module, expected: Any) -> None:
        start.wait()
        try:
            fault = calls.differences(EVERY[name](model), expected, tolerance=1e-4)
        except Exception as error:
            fault = f"raises {type(error).__name__}: {error}"
        if fault is not None:
            faults.append(f"{name}: {fault}")

    random = torch.get_rng_state()
    threads = [threading.Thread(target=act, args=one) for one in zip(names, models, wanted, strict=True)]
    with _switching():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if not faults and not torch.equal(torch.get_rng_state(), random):
        faults.append(f"{names}: the random numbers of the process moved")
    return "; ".join(faults) or None


@contextmanager
def _switching() -> Iterator[None]:
    """The interpreter changes threads as often as it can."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        yield
    finally:
        sys.setswitchinterval(usual)


ATTACKS = [
    Attack(
        f"{THREADS} threads make two calls on one network with dropout",
        "each as alone; the same parameters, their values and the random numbers as before",
        _one_network,
        few=4,
        many=107,
    ),
    Attack(
        f"{THREADS} threads make {THREADS} calls, each on its own network with dropout",
        "each as alone; the random numbers of the process as before",
        _own_networks,
        few=4,
        many=2 * len(EVERY),
    ),
]
