"""What the sections of a survey share: the workload, its anatomy, and newly built models."""

from __future__ import annotations

import contextlib
import fnmatch
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from theodolite.anatomy import Anatomy, UnclassifiedError, dissect
from theodolite.anatomy.part import Role
from theodolite.anatomy.specimen import shapes_of
from theodolite.core import arguments
from theodolite.core.batches import Batch
from theodolite.core.building import build_hollow, build_model, evaluated, in_one_line, untouched_randomness
from theodolite.core.calling import described
from theodolite.core.errors import UseError
from theodolite.core.size import Size
from theodolite.optimizers.horizon import UNCHANGED, Horizon
from theodolite.surveying.budget import Work, examples_in, first_of, pass_work
from theodolite.workloads import Workload

T = TypeVar("T")
MOST_NUMBERS, FEWEST_EXAMPLES = 2_000_000, 4
"""Limits of a batch of images, unless the survey is deep."""
TRIAL_PARAMETERS = 50_000_000
"""Up to this size the model is built and called once before anything else."""


@dataclass(frozen=True)
class SurveyContext:
    """One workload at one size. What is expensive to find is found once, when first asked for."""

    workload: Workload
    size: Size
    seed: int = 0
    deep: bool = False
    """May a section take minutes instead of seconds, for a better answer?"""
    roles: Mapping[str, Role] | None = None
    """Roles of tensors that cannot be classified automatically, by name pattern, beside the workload's."""
    to: Size | None = None
    """The size that the network will be scaled to, if it is known; with batch and tokens."""
    horizon: Horizon | str = UNCHANGED
    """The rule by which hyperparameters will follow batch and tokens."""
    _found: dict[object, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.size, Size):
            raise UseError(f"size is {self.size!r}: give a Size, for example Size(256, 4)")
        object.__setattr__(self, "size", self.size.network)
        if not isinstance(self.to, Size | None):
            raise UseError(f"to is {self.to!r}: give a Size, for example Size(1024, 16, batch=512)")
        object.__setattr__(self, "horizon", Horizon.of(self.horizon))
        arguments.seed("seed", self.seed)
        object.__setattr__(self, "roles", self.workload.roles_with(self.roles))

    def once(self, find: Callable[..., T], *more: Hashable) -> T:
        """`find(self, *more)`, called once for the same arguments and shared by all sections."""
        if (find, more) not in self._found:
            self._found[find, more] = find(self, *more)
        found: T = self._found[find, more]
        return found

    @cached_property
    def whole_batch(self) -> Batch:
        """The first batch."""
        return self.draw(0)

    @cached_property
    def batch(self) -> Batch:
        """The first batch, cut to about `MOST_NUMBERS` entries if it holds images.

        Tensors of fewer dimensions are not cut: their first one may be the nodes of a graph.
        """
        whole = self.whole_batch
        leaves = [leaf for leaf in tree_leaves(whole) if isinstance(leaf, torch.Tensor)]
        numbers = max((leaf.numel() for leaf in leaves if leaf.ndim >= 4), default=0)
        examples = examples_in(whole)
        if self.deep or examples is None or numbers <= MOST_NUMBERS:
            return whole
        return first_of(whole, max(FEWEST_EXAMPLES, examples * MOST_NUMBERS // numbers))

    @property
    def inputs(self) -> Any:
        """What the model is called with."""
        return self.batch[0]

    @property
    def anatomy(self) -> Anatomy:
        """What is in the network. Raises the same UnclassifiedError each time."""
        if isinstance(self._dissected, UnclassifiedError):
            raise self._dissected
        return self._dissected

    @cached_property
    def _dissected(self) -> Anatomy | UnclassifiedError:
        try:
            found = dissect(self.workload.build, self.inputs, size=self.size, roles=self.roles)
            _ = found.grown_blocks  # fails here if the network cannot be built at twice the depth
            return found
        except UnclassifiedError as error:
            return error

    def draw(self, step: int, *, held_out: bool = False) -> Batch:
        """A batch of the survey's seed, or a held-out one. Any exception in it becomes a UseError."""
        if held_out:
            with self._blaming(f"the held-out batch of step {step}"):
                return self.workload.draw_held_out(step)
        with self._blaming(f"batch({self.seed}, {step})"):
            return self.workload.draw(self.seed, step)

    def where(self, size: Size) -> str:
        """Begins the sentence of what was measured at a size."""
        return f"At {size}" if size == self.size else f"At {size}, a smaller network of the trials,"

    def roles_among(self, names: Iterable[str]) -> dict[str, Role]:
        """The given roles whose pattern matches one of these tensors: a smaller network may have fewer."""
        known, given = list(names), self.roles or {}
        return {pattern: role for pattern, role in given.items() if fnmatch.filter(known, pattern)}

    def forward_work(self, model: nn.Module, batch: Batch) -> Work:
        """Work of a forward pass and the loss."""
        with untouched_randomness(self.seed), evaluated(model), torch.no_grad():
            return pass_work(lambda: self.workload.evaluate(model, batch))

    def build(self, size: Size | None = None) -> nn.Module:
        """A model of this size, initialised from the survey's seed."""
        with self._named():
            return build_model(self.workload.build, size or self.size, seed=self.seed)

    def build_hollow(self, size: Size) -> nn.Module:
        """A model on the meta device, if build allows it: for its shapes."""
        with self._named():
            return build_hollow(self.workload.build, size)

    def shapes(self, size: Size) -> dict[str, tuple[int, ...]]:
        """The shapes of all parameters at a size."""
        return shapes_of(self.build_hollow(size))

    def num_parameters(self, size: Size) -> int:
        """The number of parameters at a size."""
        return sum(map(math.prod, self.shapes(size).values()))

    def evaluate(self, model: nn.Module) -> torch.Tensor:
        """The loss on the first batch, without gradients. Any exception in it becomes a UseError."""
        with self.calling(), torch.no_grad():
            return self.workload.evaluate(model, self.batch)

    def calling(self, step: int = 0) -> contextlib.AbstractContextManager[None]:
        """Turn exceptions of the model and its loss into UseErrors that name them."""
        return self._blaming(f"the model and its loss on batch({self.seed}, {step})")

    def check(self) -> bool:
        """Is the loss of a new network finite? True if the network is too large to try.

        Raises UseError if the workload gives no batch, cannot be built, fails when called or ignores width.
        """
        _ = self.inputs
        name, size = self.workload.name, self.size
        here = self.shapes(size)
        if not here:
            raise UseError(f"workload {name!r}: build({size.width}, {size.depth}) has no parameters")
        wider = Size(2 * size.width, size.depth)
        if self.shapes(wider) == here:
            raise UseError(
                f"workload {name!r}: build ignores width: build({size.width}, {size.depth}) and "
                f"build({wider.width}, {wider.depth}) have the same {len(here)} shapes. "
                "Let the first argument of build set the size of the hidden layers"
            )
        if self.num_parameters(size) > TRIAL_PARAMETERS:
            return True
        loss = self.evaluate(self.build())
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise UseError(
                f"workload {name!r}: loss returned {described(loss)}, not a tensor with one number"
            )
        return math.isfinite(float(loss))

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Put the workload's name in front of a UseError."""
        try:
            yield
        except UseError as error:
            raise UseError(f"workload {self.workload.name!r}: {error}") from error

    @contextlib.contextmanager
    def _blaming(self, culprit: str) -> Iterator[None]:
        """Turn an exception of the caller's code into a UseError that names it."""
        try:
            yield
        except UseError:
            raise
        except Exception as error:
            raise UseError(
                f"workload {self.workload.name!r}: {culprit} failed: {in_one_line(error)}"
            ) from error
