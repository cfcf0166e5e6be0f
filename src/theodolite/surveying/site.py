"""What a section may look at: the workload, its anatomy, and models freshly built from it."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import nn

from theodolite.anatomy import Anatomy, AnatomyError, dissect
from theodolite.anatomy.part import Role
from theodolite.errors import UseError
from theodolite.size import Size
from theodolite.workloads import Batch, Workload


@dataclass(frozen=True)
class Site:
    """One workload at one size. What is dear to find is found once, when it is first asked for."""

    workload: Workload
    size: Size
    seed: int = 0
    deep: bool = False
    """May a section take minutes where seconds would give a rougher answer?"""
    roles: Mapping[str, Role] | None = None
    """What tensors are that cannot be classified by looking, by pattern of their names."""

    @cached_property
    def batch(self) -> Batch:
        """The first batch; whatever goes wrong with it is an error of use."""
        with _blaming(f"workload {self.workload.name!r}: batch({self.seed}, 0)"):
            return self.workload.draw(self.seed, 0)

    @property
    def inputs(self) -> Any:
        """What the model is called with."""
        return self.batch[0]

    @property
    def anatomy(self) -> Anatomy:
        """What is in the network; raises the same AnatomyError to everyone who asks."""
        if isinstance(self._dissected, AnatomyError):
            raise self._dissected
        return self._dissected

    @cached_property
    def _dissected(self) -> Anatomy | AnatomyError:
        try:
            return self.dissect(self.size)
        except AnatomyError as error:
            return error

    def dissect(self, size: Size) -> Anatomy:
        """What is in the network at another size."""
        return dissect(self.workload.build, self.inputs, size=size, roles=self.roles)

    def build(self, size: Size | None = None, *, device: str = "cpu") -> nn.Module:
        """A model of this size, initialised from the survey's seed; its own exceptions are errors of use."""
        size = size or self.size
        torch.manual_seed(self.seed)
        with (
            _blaming(f"workload {self.workload.name!r}: build({size.width}, {size.depth})"),
            torch.device(device),
        ):
            model = self.workload.build(size.width, size.depth)
        if not isinstance(model, nn.Module):
            raise UseError(
                f"workload {self.workload.name!r}: build({size.width}, {size.depth}) returned "
                f"{type(model).__name__}, not a torch.nn.Module"
            )
        return model

    def evaluate(self, model: nn.Module) -> torch.Tensor:
        """The loss on the first batch, without gradients; whatever fails in it is an error of use."""
        culprit = f"workload {self.workload.name!r}: the model and its loss on batch({self.seed}, 0)"
        with _blaming(culprit), torch.no_grad():
            return self.workload.evaluate(model, self.batch)


@contextlib.contextmanager
def no_trace() -> Iterator[None]:
    """Leave every random number generator as it was found: torch on all devices in use, numpy, Python."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def last_line(error: BaseException) -> str:
    """An exception as the last line of its traceback would name it."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


@contextlib.contextmanager
def _blaming(culprit: str) -> Iterator[None]:
    """Turn the caller's own exception into an error of use that names it."""
    try:
        yield
    except UseError:
        raise
    except Exception as error:
        raise UseError(f"{culprit} failed: {last_line(error)}") from error
