"""The parameterization `own`: a network as it builds itself, trained by the optimizer of its author."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from theodolite.anatomy import Anatomy, dissect
from theodolite.anatomy.part import Part
from theodolite.core import arguments
from theodolite.core.building import build_hollow, build_model
from theodolite.core.calling import Build
from theodolite.core.errors import UseError
from theodolite.core.exclusive import exclusive
from theodolite.core.size import Size
from theodolite.optimizers.group_scales import apply_group_scales, note_of_scales
from theodolite.optimizers.planned import set_lr
from theodolite.optimizers.schedule import Refined
from theodolite.optimizers.spec import Make
from theodolite.optimizers.step_checks import required_arguments
from theodolite.planning.exporting import Exported
from theodolite.planning.factory import (
    Made,
    MakeOptimizer,
    OwnOptions,
    made_as_one,
    make_optimizers,
    read_options,
)
from theodolite.planning.init_distribution import InitDistribution
from theodolite.planning.initialising import draw_weights, put_values
from theodolite.planning.plan import Plan, refuse_hollow
from theodolite.planning.rows import PlanRow, fold_rows, plan_table
from theodolite.present.result import Block, Result
from theodolite.present.text import counted, number

LEFT_ALONE = {
    "absent": "In no group of the optimizer, and so left as they start",
    "frozen": "Frozen by the factory, and so left as they start",
    "twice": "In several groups, each of which makes its step (the table has the first)",
}
"""States of a tensor that a reader should know of: what to say."""


@dataclass(frozen=True)
class Own(Plan):
    """A network and its optimizer at one size, as their author has them. Made by `own`.

    A plan whose rows are read from the optimizer: whatever takes a plan trains the network with it. `lr`
    stands for the default learning rate of the first optimizer; another one (`at`) multiplies the rates of
    all groups by the same factor.
    """

    kind: ClassVar[str] = "parameterization"
    loads: ClassVar[bool] = False
    _noun: ClassVar[str] = "own parameterization"

    own_lr: float = math.nan
    """The default learning rate of the first optimizer, as it is made; nan if it has none."""
    num_groups: int = 0
    make: MakeOptimizer | None = field(default=None, compare=False, repr=False)
    """The factory."""

    @property
    def factor(self) -> float:
        """What the learning rates of all groups are multiplied by."""
        return 1.0 if math.isnan(self.own_lr) else self.lr / self.own_lr

    @property
    def title(self) -> str:
        """The optimizer and the size."""
        return f"own, {self.optimizer_name} at {self.size}"

    def at(self, lr: float) -> Self:
        """The same with all learning rates multiplied: `lr` is the new default of the first optimizer."""
        lr = arguments.positive("lr", lr)
        if not self.own_lr > 0:
            raise UseError(
                f"lr is {lr:g}, and the first optimizer of the factory has no default learning rate that it "
                "could stand for: give its class one, as in AdamW(groups, lr=0.01)"
            )
        without = next((row.name for row in self.trained if math.isnan(row.lr)), None)
        if without is not None:
            raise UseError(f"lr is {lr:g}, and the group of {without} has no learning rate to multiply")
        factor = lr / self.own_lr / self.factor
        rows = {name: replace(row, lr=row.lr * factor) for name, row in self.rows.items()}
        return replace(self, lr=lr, rows=rows)

    def blocks(self) -> Iterator[Block]:
        """The optimizer, a table of the tensors, and notes."""
        rates = "" if self.factor == 1 else f", learning rates × {number(self.factor)}"
        groups = counted(self.num_groups, "group")
        yield f"{self.title}{rates}\n{counted(len(self.trained), 'tensor')} in {groups}"
        yield plan_table(self.rows.values(), folded=True)
        yield from self.notes

    def param_groups(self, model: nn.Module, *, skip: Sequence[str] = ()) -> list[dict[str, Any]]:
        """The groups that the factory makes of the model."""
        return self.optimizer(model, skip=skip).param_groups

    def optimizer(
        self,
        model: nn.Module,
        *,
        skip: Sequence[str] = (),
        make: Make | None = None,
        check_gradients: bool = True,
    ) -> Optimizer:
        """What the factory makes of the model; several optimizers are joined into one.

        Args:
            model: the network.
            skip: nothing can be left out: the factory decides that.
            make: the factory makes the optimizer, so there is nothing else to make it.
            check_gradients: changes nothing: the optimizer makes its steps as it does elsewhere.
        """
        if skip or make is not None:
            raise UseError("skip and make are for plans: here the factory chooses tensors and optimizers")
        assert self.make is not None
        self.match(model)
        made = made_as_one(self.make, model)
        if self.factor != 1:
            for group in made.param_groups:
                set_lr(group, float(group["lr"]) * self.factor)
        if hasattr(made, "train"):  # those that average weights begin with the averages
            made.train()
        return made

    def schedule(
        self,
        optimizer: Optimizer,
        kind: str | Refined = "cosine",
        *,
        steps: int | None = None,
        warmup: int = 0,
        final: float = 0.0,
        tokens_per_step: int | None = None,
    ) -> LambdaLR:
        """A schedule that multiplies the learning rates of all groups by the same factor at every step."""
        if kind != "constant" and any(spec.averages for spec in self.specs):
            raise UseError(
                "the factory's optimizer replaces a schedule: it averages weights where others lower the "
                "learning rate. Leave the schedule out, or use constant with a warmup"
            )
        return super().schedule(
            optimizer, kind, steps=steps, warmup=warmup, final=final, tokens_per_step=tokens_per_step
        )

    def attach(self, model: nn.Module) -> nn.Module:
        """Change nothing: the network has the multipliers that its author gave it."""
        return model

    @exclusive()
    def initialize(self, model: nn.Module, seed: int = 0) -> nn.Module:
        """Give the network the values that it starts with when it builds itself, in place."""
        tensors, built = self.match(model), self.match(self._built(seed))
        refuse_hollow(tensors)
        with torch.no_grad():
            for name, tensor in tensors.items():
                put_values(tensor, built[name].detach())
        return self._drawn(model, seed, {})

    def export(self, format: str, *, names: Mapping[str, str] | None = None) -> Exported:
        """Refuse: options of the factory's optimizers, such as momentum and betas, are in no row."""
        raise UseError(
            f"the own parameterization cannot be exported for {format}, as its rows do not have all options "
            "of the factory's optimizers. Export a plan or groups: theodolite.groups(build, inputs, …)"
        )

    def to_dict(self) -> dict[str, Any]:
        """The rows and what holds for all, without functions. It cannot be read again."""
        return Result.to_dict(self)

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> Self:
        """Refuse: the factory and the build function are in no file."""
        raise UseError("a parameterization of its own cannot be read: make it again from the workload")

    def _drawn(self, model: nn.Module, seed: int, own: Mapping[str, Tensor]) -> nn.Module:
        """The network as it is, but for rows that were given another start, such as a readout at zero."""
        draw_weights(self.rows, self.match(model), arguments.seed("seed", seed), own)
        return model

    def _made_for(self) -> tuple[str, str]:
        return (
            f"the parameterization is that of width {self.size.width}, depth {self.size.depth} and does not",
            "Give a network that its build function makes at this size",
        )


def own(
    build: Build,
    inputs: Any,
    make: MakeOptimizer | None,
    *,
    size: Size,
    lr: float | None = None,
    anatomy: Anatomy | None = None,
    roles: Any = None,
) -> Own:
    """The parameterization that the author of a network has at a size, read from the optimizer.

    Args:
        build: `build(width, depth) -> nn.Module`.
        inputs: what the model is called with.
        make: the factory, `make(model) -> Optimizer`; several, and schedulers, as
            `theodolite.planning.factory` takes them.
        size: of the network.
        lr: in place of the default learning rate of the first optimizer; all groups follow it.
        anatomy: of the network at this size, if it is there already.
        roles: as in `theodolite.plan`.

    >>> import theodolite as th
    >>> tokens = torch.zeros(1, 8, dtype=torch.long)
    >>> make = lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    >>> mine = own(th.models.GPT, tokens, make, size=Size(64, 2))
    >>> mine.title, mine["readout.weight"].lr, mine.at(0.02)["readout.weight"].lr
    ('own, AdamW at 64 × 2', 0.01, 0.02)
    """
    if make is None:
        raise UseError(
            "the parameterization is own, and the workload says nothing of its optimizer: "
            "give Workload(…, optimizer=make_optimizer) with your function (model) -> Optimizer"
        )
    anatomy = dissect(build, inputs, size=size, roles=roles) if anatomy is None else anatomy
    made, found = _read(build, make, size)
    _check_steps(made.optimizers)
    rows = {part.name: _row(part, found[part.name]) for part in anatomy.values()}
    first = made.optimizers[0].defaults
    used = dict.fromkeys(found[name].class_name for name, row in rows.items() if row.rule)
    own_lr, decay, eps = (_positive(first.get(name)) for name in ("lr", "weight_decay", "eps"))
    plan = Own(
        size=size,
        base=size,
        optimizer_name=" and ".join(used),
        lr=own_lr or math.nan,
        weight_decay=decay,
        eps=eps,
        policy="everything",
        options={},
        vector_options={},
        rows=rows,
        multipliers={},
        notes=(*made.notes, *_notes(rows, found), *_default(own_lr, rows)),
        build_function=build,
        inputs=inputs,
        own_lr=own_lr or math.nan,
        num_groups=sum(len(one.param_groups) for one in made.optimizers),
        make=make,
    )
    return plan if lr is None else plan.at(lr)


def _read(build: Build, make: MakeOptimizer, size: Size) -> tuple[Made, dict[str, OwnOptions]]:
    """The optimizers and the options of each tensor: of a network without memory, if the factory takes it."""
    for model_of in (build_hollow, build_model):
        model = model_of(build, size)
        try:
            made = make_optimizers(make, model)
        except UseError:
            if model_of is build_model:
                raise
            continue
        said = note_of_scales(apply_group_scales(made.optimizers))
        made = replace(made, notes=(*made.notes, *[said] * bool(said)))
        return made, read_options(model, made.optimizers)
    raise AssertionError("the last one returns or raises")


def _check_steps(optimizers: Sequence[Optimizer]) -> None:
    """Refuse optimizers that cannot be trained with by backward() and step()."""
    for one in optimizers:
        if needed := required_arguments(one):
            raise UseError(
                f"a step of the factory's {type(one).__name__} needs {' and '.join(needed)}, and training "
                "here calls step() after backward(). Give an optimizer whose step needs nothing else"
            )


def _row(part: Part, options: OwnOptions) -> PlanRow:
    kept = InitDistribution("kept")
    reasons = {
        "tensor": f"of shape {'×'.join(map(str, part.shape)) or '()'}",
        "init": "as the network builds it",
    }
    if options.state in ("absent", "frozen") or not part.trained:
        return PlanRow.of(part, init=kept, reasons={**reasons, "lr": "none: no step moves it"})
    where = f"group {options.group} of the factory's optimizers, trained by {options.class_name}"
    return PlanRow.of(
        part,
        init=kept,
        rule=options.rule or options.class_name,
        lr=options.lr,
        weight_decay=options.weight_decay,
        eps=options.eps or 0.0,
        reasons={**reasons, "lr": where},
    )


def _notes(rows: Mapping[str, PlanRow], found: Mapping[str, OwnOptions]) -> Iterator[str]:
    trained = [options for name, options in found.items() if rows[name].trained]
    for state, said in LEFT_ALONE.items():
        if them := [options for options in trained if options.state == state]:
            patterns = [pattern for pattern, _ in fold_rows([rows[one.name] for one in them], lambda _: None)]
            yield f"{said}: {', '.join(patterns)} ({counted(len(them), 'tensor')})."
    if unknown := dict.fromkeys(one.class_name for one in trained if one.class_name and one.rule is None):
        yield f"No rule is known for {' and '.join(unknown)}, so how its steps should scale is not judged."


def _default(own_lr: float, rows: Mapping[str, PlanRow]) -> Iterator[str]:
    """Where no tensor has the default learning rate, that a sweep over it is in other units."""
    rates = sorted({row.lr for row in rows.values() if row.rule and row.lr > 0})
    if own_lr and rates and own_lr not in rates:
        span = " to ".join(dict.fromkeys(number(rate) for rate in (rates[0], rates[-1])))
        yield (
            f"The default learning rate of the first optimizer, {number(own_lr)}, is that of no group: they "
            f"have {span}. A sweep names its runs by the default, so give the class the rate that your "
            "groups are multiples of."
        )


def _positive(value: Any) -> float:
    return float(value) if isinstance(value, int | float | Tensor) and float(value) > 0 else 0.0
