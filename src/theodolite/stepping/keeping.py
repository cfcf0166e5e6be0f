"""What training changes, kept and put back: weights, buffers, gradients, modes, optimizer and data state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from theodolite.building import untouched_randomness
from theodolite.probes.steps.update import Snapshot

Restore = Callable[[], None]


@contextmanager
def kept(model: nn.Module, optimizer: Optimizer, loss: object = None) -> Iterator[Restore]:
    """Everything that steps change is as before at the end, also after an error or Ctrl-C.

    Yields a function that puts it back at any time, without gradients, to begin again. It costs a copy of the
    weights and of the optimizer's state. Attributes of modules get their objects back; what is inside of an
    object that is no tensor stays changed.

    >>> model = nn.Linear(2, 1)
    >>> optimizer, before = torch.optim.Adam(model.parameters()), model.weight.tolist()
    >>> with kept(model, optimizer) as restore:
    ...     model(torch.ones(1, 2)).sum().backward()
    ...     optimizer.step()
    >>> model.weight.tolist() == before, model.weight.grad, len(optimizer.state)
    (True, None, 0)
    """
    everything = nn.ModuleList([model, *([loss] if isinstance(loss, nn.Module) else [])])
    snapshot = Snapshot(optimizer, everything)
    tables = [
        (table, dict(table))
        for module in everything.modules()
        for table in (vars(module), module._buffers, module._parameters)
    ]

    def put_back() -> None:
        for table, before in tables:
            table.clear()
            table.update(before)
        snapshot.restore()

    def restore() -> None:
        put_back()
        for tensor in everything.parameters():
            tensor.grad = None

    try:
        yield restore
    finally:
        put_back()


@contextmanager
def kept_data(data: object) -> Iterator[None]:
    """What reading a DataLoader changes is as before at the end: its generators and those of its samplers."""
    with untouched_randomness():
        if not isinstance(data, DataLoader):
            yield
            return
        samplers = [data.sampler, data.batch_sampler, getattr(data.batch_sampler, "sampler", None)]
        generators = {
            value: value.get_state()
            for owner in (data, *samplers)
            for value in getattr(owner, "__dict__", {}).values()
            if isinstance(value, torch.Generator)
        }
        iterator = data._iterator  # of persistent workers: those that begin here end here
        try:
            yield
        finally:
            data._iterator = iterator
            for generator, state in generators.items():
                generator.set_state(state)
