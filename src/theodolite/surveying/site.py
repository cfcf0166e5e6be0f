"""What a section may look at: the workload, its anatomy, and models freshly built from it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from theodolite.anatomy import Anatomy, UnclassifiedError, dissect
from theodolite.anatomy.part import Role
from theodolite.anatomy.specimen import examine_built
from theodolite.core.batches import Batch
from theodolite.core.building import build_hollow, build_model, in_one_line
from theodolite.core.errors import UseError
from theodolite.core.size import Size
from theodolite.surveying.batches import examples_in, first_of
from theodolite.workloads import Workload

if TYPE_CHECKING:
    from theodolite.surveying.not_finite import Start
    from theodolite.surveying.trials import Trials

MOST_NUMBERS, FEWEST_EXAMPLES = 2_000_000, 4
"""In a batch of images, unless there is time."""


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

    def __post_init__(self) -> None:
        if not isinstance(self.size, Size):
            raise UseError(f"size is {self.size!r}: give a Size, for example Size(256, 4)")
        if not isinstance(self.seed, int) or not 0 <= self.seed < 2**63:
            raise UseError(f"seed is {self.seed!r}: a seed is a whole number from 0 to 2⁶³ − 1")

    @cached_property
    def whole_batch(self) -> Batch:
        """The first batch; whatever goes wrong with it is an error of use."""
        with self._blaming(f"batch({self.seed}, 0)"):
            return self.workload.draw(self.seed, 0)

    @cached_property
    def batch(self) -> Batch:
        """The first batch; of images, without the examples beyond `MOST_NUMBERS`.

        Tensors of fewer dimensions are left whole: their first one may be the nodes of a graph.
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
        """What is in the network; raises the same UnclassifiedError to everyone who asks."""
        if isinstance(self._dissected, UnclassifiedError):
            raise self._dissected
        return self._dissected

    @cached_property
    def _dissected(self) -> Anatomy | UnclassifiedError:
        try:
            found = dissect(self.workload.build, self.inputs, size=self.size, roles=self.roles)
            _ = found.grown_blocks  # a network that cannot be built at twice the depth is told of here
            return found
        except UnclassifiedError as error:
            return error

    @cached_property
    def start(self) -> Start:
        """Are the loss, the weights and the gradients of a new network finite?"""
        from theodolite.surveying.not_finite import look_at_start

        with self._blaming(f"the model and its loss on batch({self.seed}, 0)"):
            return look_at_start(self)

    @cached_property
    def trials(self) -> Trials:
        """Small networks to train for a few steps."""
        from theodolite.surveying.trials import find_trials

        return find_trials(self)

    def build(self, size: Size | None = None) -> nn.Module:
        """A model of this size, initialised from the survey's seed."""
        with self._named():
            return build_model(self.workload.build, size or self.size, seed=self.seed)

    def build_hollow(self, size: Size) -> nn.Module:
        """A model of this size to ask for its shapes; it takes no memory unless build insists on it."""
        with self._named():
            return build_hollow(self.workload.build, size)

    def build_traceable(self, size: Size) -> nn.Module:
        """A model whose forward pass can be recorded: hollow, unless its values decide what it computes."""
        with self._named():
            return examine_built(self.workload.build, size, self.inputs).model

    def evaluate(self, model: nn.Module) -> torch.Tensor:
        """The loss on the first batch, without gradients; whatever fails in it is an error of use."""
        with self._blaming(f"the model and its loss on batch({self.seed}, 0)"), torch.no_grad():
            return self.workload.evaluate(model, self.batch)

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Put the workload's name before an error of use."""
        try:
            yield
        except UseError as error:
            raise UseError(f"workload {self.workload.name!r}: {error}") from error

    @contextlib.contextmanager
    def _blaming(self, culprit: str) -> Iterator[None]:
        """Turn the caller's own exception into an error of use that names it."""
        try:
            yield
        except UseError:
            raise
        except Exception as error:
            raise UseError(
                f"workload {self.workload.name!r}: {culprit} failed: {in_one_line(error)}"
            ) from error
