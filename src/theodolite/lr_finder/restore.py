"""What training changes, kept and put back: weights, buffers, gradients, modes and optimizer state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn
from torch.optim import Optimizer

from theodolite.probes.steps.update import Snapshot

Restore = Callable[[], None]


@contextmanager
def kept(model: nn.Module, optimizer: Optimizer, loss: object = None) -> Iterator[Restore]:
    """Everything that steps change is as before at the end, also after an error or Ctrl-C.

    Yields a function that puts it back at any time, without gradients, to begin again. It costs a copy of the
    weights and of the optimizer's state. Attributes of modules get their objects back; what is inside of an
    object that is no tensor stays changed.

    >>> import torch
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
