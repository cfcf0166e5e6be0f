"""The plan: for every tensor how it starts and how it is trained at the target size."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from theodolite.anatomy.part import UNTRAINED
from theodolite.core.calling import Build
from theodolite.core.errors import UseError
from theodolite.core.size import Size
from theodolite.planning.law import Law

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LambdaLR

    from theodolite.optimizers.schedule import Refined
    from theodolite.surgery.proof import Proof


@dataclass(frozen=True)
class Row:
    """One tensor: how it starts, and its hyperparameters."""

    name: str
    shape: tuple[int, ...]
    role: str
    block: int | None
    fan_in: int
    fan_out: int
    in_axes: tuple[int, ...]
    out_axes: tuple[int, ...]
    rows: tuple[tuple[tuple[int, int], ...], ...]
    """Blocks of outputs that are matrices by themselves, as in fused queries, keys and values."""
    scale_free: bool
    """Is it divided by a norm of itself, so that only its direction counts?"""
    rule: str
    """The optimizer that trains it: the plan's own, or the one its vectors get; empty if none does."""
    multiplier: float
    """A real one, on the readout of a tied embedding; 1 where it was absorbed into all that follows."""
    init: Law
    lr: float
    weight_decay: float
    eps: float
    extent: float
    """Factor on what the optimizer keeps in units of the weight (the radius of SSO, the clip of Sophia)."""
    reasons: Mapping[str, str]
    """In words, with the numbers put in: what it is, and where each column comes from."""

    @property
    def trained(self) -> bool:
        """Does the plan train it? It leaves what is `frozen` or `unused` as it is."""
        return self.role not in UNTRAINED


@dataclass(frozen=True)
class Plan:
    """A rule over an anatomy. Made by `theodolite.plan`."""

    size: Size
    base: Size
    optimizer_name: str
    lr: float
    weight_decay: float
    eps: float
    policy: str
    options: Mapping[str, Any]
    """Further options of the optimizer: betas, momentum, …"""
    vector_options: Mapping[str, Any]
    """The same for the optimizer that vectors get beside a matrix optimizer."""
    rows: Mapping[str, Row]
    multipliers: Mapping[str, float]
    """By module: the real multiplier on its input. Only the readout of a tied embedding has one."""
    notes: tuple[str, ...] = ()
    """What the reader should know beside the numbers."""
    build_function: Build | None = field(default=None, compare=False, repr=False)
    inputs: Any = field(default=None, compare=False, repr=False)
    """What the network was called with when the plan was made; not saved."""

    def __getitem__(self, name: str) -> Row:
        try:
            return self.rows[name]
        except KeyError:
            raise UseError(f"{name!r} is not a tensor of this plan") from None

    @property
    def trained(self) -> tuple[Row, ...]:
        """The rows of the tensors that are trained: all but those that are `frozen` or `unused`."""
        return tuple(row for row in self.rows.values() if row.trained)

    def __str__(self) -> str:
        from theodolite.planning.table import table

        return table(self)

    def explain(self, name: str) -> str:
        """Where the numbers of one tensor come from."""
        from theodolite.planning.explaining import explained

        return explained(self, name)

    def build(self, seed: int = 0, *, device: str = "cpu") -> nn.Module:
        """The network at the target size, initialised by the plan."""
        from theodolite.planning.initialising import build

        return build(self, seed, device=device)

    def initialize(self, model: nn.Module, seed: int = 0) -> nn.Module:
        """Draw the network's weights by the plan, in place; the same for the same seed on every device."""
        from theodolite.planning.initialising import initialize

        return initialize(self, model, seed)

    def attach(self, model: nn.Module) -> nn.Module:
        """Put the plan's real multipliers on the network, if it has any and they are not there yet."""
        from theodolite.planning.readout import attach

        return attach(self, model)

    def bake(self, model: nn.Module, inputs: Any = None) -> tuple[nn.Module, Proof]:
        """Fold the real multipliers into the gains of the norms before them, in place: for export.

        The network computes the same without a hook: any program that builds the plain architecture and
        loads the weights computes the same too. The multiplier goes into the gain (and the shift) of the norm
        that only the readout reads. Where there is none the network is left as it was, and the error says
        why. See `theodolite.surgery.bake`.

        Bake after training, or bake a copy. Training on afterwards is training with another parametrization,
        in which the plan's learning rate of that gain is wrong: an optimizer made before must not go on.

        Args:
            model: trained under this plan, with its multipliers on it; DDP or `torch.compile` may be around.
            inputs: what it is called with, for the proof; what the plan was made with if not given.

        Returns:
            The model, and a Proof: by how much outputs and gradients differ.
        """
        from theodolite.surgery.baking import bake_plan

        return bake_plan(self, model, inputs)

    def param_groups(self, model: nn.Module, *, skip: Sequence[str] = ()) -> list[dict[str, Any]]:
        """Plain parameter groups, equal rows merged. `skip` holds patterns of tensors to leave out."""
        from theodolite.planning.grouping import param_groups

        return param_groups(self, model, skip=skip)

    def optimizer(
        self,
        model: nn.Module,
        *,
        skip: Sequence[str] = (),
        make: Callable[[list[dict[str, Any]]], Optimizer] | None = None,
        check_gradients: bool = True,
    ) -> Optimizer:
        """One torch optimizer for all tensors, whatever the number of rules.

        `make` turns parameter groups into an optimizer, for a rule that is none of the built-in ones. A step
        along a gradient that is not finite is refused, with the tensor's name, unless `check_gradients` is
        off: to know it, a step waits for the device.
        """
        from theodolite.planning.grouping import make_optimizer

        return make_optimizer(self, model, skip=skip, make=make, check_gradients=check_gradients)

    def schedule(
        self,
        optimizer: Optimizer,
        kind: str | Refined = "cosine",
        *,
        steps: int | None = None,
        warmup: int = 0,
        final: float = 0.0,
    ) -> LambdaLR:
        """One factor for all groups at every step, so that their ratios stay."""
        from theodolite.optimizers import OPTIMIZERS, schedule

        spec = OPTIMIZERS.get(self.optimizer_name)
        if spec is not None and spec.averages and kind != "constant":
            raise UseError(
                f"{spec.name} replaces a schedule: it averages weights where others lower the learning rate. "
                "Leave the schedule out, or use constant with a warmup"
            )
        return schedule(optimizer, kind, steps=steps, warmup=warmup, final=final)

    def diff(self, other: Plan) -> str:
        """What another plan does differently, tensor by tensor."""
        from theodolite.planning.diff import diff

        if not isinstance(other, Plan):
            raise UseError(f"other is {other!r}: give a Plan, for example Plan.load(path)")
        return diff(self, other)

    def save(self, path: str | Path) -> Path:
        """Write the plan as JSON."""
        from theodolite.planning.storing import save

        return save(self, path)

    @staticmethod
    def load(path: str | Path, build: Build | None = None) -> Plan:
        """Read a plan; `build` is what `plan.build` will call."""
        from theodolite.planning.storing import load

        return load(path, build)
