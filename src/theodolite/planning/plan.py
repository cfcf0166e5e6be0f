"""`Plan`: how every tensor starts and is trained at the target size; what it makes of a network."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from theodolite.anatomy.names import matching
from theodolite.core import arguments
from theodolite.core.building import build_model
from theodolite.core.calling import Build
from theodolite.core.errors import UseError
from theodolite.core.exclusive import exclusive
from theodolite.core.size import Size
from theodolite.optimizers import OPTIMIZERS, POLICIES, schedule
from theodolite.optimizers.horizon import Horizon, Stretch
from theodolite.optimizers.scaling import fraction
from theodolite.optimizers.schedule import Refined
from theodolite.optimizers.spec import Make, OptimizerSpec
from theodolite.planning.caveats import WARNING
from theodolite.planning.initialising import draw_weights, fit_singular_vectors
from theodolite.planning.per_tensor import PerTensor
from theodolite.planning.readout_multiplier import attach_multipliers
from theodolite.planning.rows import (
    LARGEST,
    PlanDiff,
    PlanRow,
    change,
    check_multiplier,
    check_row,
    compare_rows,
    count_groups,
    fold_rows,
    plan_table,
)
from theodolite.present.result import Block, Result
from theodolite.present.text import Table, counted, number

VERSION = 2
"""Of the format of a saved plan."""


_BASE_VALUES = {
    "size": "size",
    "base": "base size",
    "optimizer_name": "optimizer",
    "lr": "base lr",
    "weight_decay": "base weight decay",
    "eps": "base eps",
    "policy": "decay policy",
    "options": "options",
    "vector_options": "vector options",
    "multipliers": "multipliers",
    "horizon": "rule for batch and tokens",
}
"""What holds for the whole plan, by field: its name."""


@dataclass(frozen=True)
class Explanation(Result):
    """Where the numbers of one tensor come from. Made by `Plan.explain`."""

    kind: ClassVar[str] = "explanation of a plan"
    loads: ClassVar[bool] = True

    tensor: str
    alike: int
    """Further tensors of the pattern that was asked for, which have the same numbers."""
    pattern: str
    reasons: Mapping[str, str]
    """By column: the formula with its numbers; in further lines, why."""

    def blocks(self) -> Iterator[Block]:
        """The tensor, and the reason for each of its numbers."""
        more = f", and the same for {self.alike} more of {self.pattern}" if self.alike else ""
        yield f"{self.tensor}{more}"
        yield self.table()

    def table(self) -> Table:
        """A line for each line of a reason."""
        lines: list[tuple[str, str]] = []
        for column, reason in self.reasons.items():
            first, *rest = reason.split("\n")
            lines += [(column, first), *(("", line) for line in rest)]
        return Table(("number", "where it comes from"), lines)


@dataclass(frozen=True)
class Plan(PerTensor):
    """How every tensor starts and is trained at a size. Made by `theodolite.plan`."""

    kind: ClassVar[str] = "plan"
    loads: ClassVar[bool] = True

    size: Size
    base: Size
    optimizer_name: str
    lr: float
    weight_decay: float
    eps: float
    policy: str
    options: Mapping[str, Any]
    """Further options of the optimizer at this size: betas, momentum, …"""
    vector_options: Mapping[str, Any]
    """Further options of the optimizer that vectors get beside a matrix optimizer."""
    rows: Mapping[str, PlanRow]
    multipliers: Mapping[str, float]
    """Multipliers on the inputs of modules. Only the readout of a tied embedding has one."""
    notes: tuple[str, ...] = ()
    """What the plan cannot do, and what to know beside the numbers."""
    horizon: str = "none"
    """The rule for batch and tokens, `theodolite.optimizers.horizon`."""
    build_function: Build | None = field(default=None, compare=False, repr=False)
    inputs: Any = field(default=None, compare=False, repr=False)
    """What the network was called with when the plan was made; not saved."""

    @property
    def specs(self) -> tuple[OptimizerSpec, ...]:
        """The records of the optimizers of its tensors, as far as there are any."""
        rules = dict.fromkeys(row.rule for row in self.trained)
        return tuple(OPTIMIZERS[rule] for rule in rules if rule in OPTIMIZERS)

    @property
    def title(self) -> str:
        """The rule and both sizes."""
        others = sorted({row.rule for row in self.trained} - {self.optimizer_name})
        beside = f" beside {' and '.join(others)}" if others else ""
        wider, deeper = self.size.width / self.base.width, self.size.depth / self.base.depth
        grown = f"width × {number(wider)}, depth × {number(deeper)}"
        stretch = Stretch.between(self.base, self.size)
        grown += "".join(f", {name} × {fraction(getattr(stretch, name))}" for name in stretch.changes)
        return f"{self.optimizer_name}{beside}, {self.base} → {self.size} ({grown})"

    def blocks(self) -> Iterator[Block]:
        """The sizes, the values at base size, a table of the tensors, and notes."""
        at_base = f"at base size lr {number(self.lr)}"
        if self.weight_decay and self.policy != "none":
            at_base += f", weight decay {number(self.weight_decay)} ({self.policy})"
        if Stretch.between(self.base, self.size).changes:
            at_base += f"; batch and tokens by the rule {self.horizon}"
            at_base += "".join(f"; {words} at the target" for words in self._averages())
        groups = count_groups(self.trained, self._options())
        yield f"{self.title}\n{at_base}; {counted(len(self.trained), 'tensor')} in {counted(groups, 'group')}"
        yield from (note for note in self.notes if note.startswith(WARNING))
        yield plan_table(self.rows.values(), folded=True)
        yield from (note for note in self.notes if not note.startswith(WARNING))

    def _averages(self) -> Iterator[str]:
        """The decay rates that the rule for batch and tokens gives each optimizer, if it changes them."""
        if Horizon.of(self.horizon).rates != "sde" or Stretch.between(self.base, self.size).batch == 1:
            return
        for spec in self.specs:
            options = self.options if spec.name == self.optimizer_name else self.vector_options
            for name in () if spec.memory is None else spec.memory.usual:
                rates = options.get(name)
                if rates:
                    each = rates if isinstance(rates, tuple | list) else [rates]
                    yield f"{name} of {spec.name} {', '.join(number(one, 4) for one in each)}"

    def table(self) -> Table:
        """A line for each tensor."""
        return plan_table(self.rows.values(), folded=False)

    def explain(self, name: str) -> Explanation:
        """Where the numbers of one tensor come from; `name` may be a pattern if all that match are alike."""
        found = [self.rows[one] for one in ([name] if name in self.rows else matching(self.rows, name))]
        if not found:
            near = [one for one in self.rows if name in one] if name else []
            near = (near or difflib.get_close_matches(name, self.rows))[:3]
            hint = f"Did you mean {' or '.join(near)}?" if near else "print(plan) shows all of them"
            raise UseError(f"{name!r} is not a tensor of this plan. {hint}")
        kinds = fold_rows(
            found, lambda row: (row.role, row.rule, row.init, row.lr, row.weight_decay, row.eps)
        )
        if len(kinds) > 1:
            listed = ", ".join(kind for kind, _ in kinds[:6]) + (", …" if len(kinds) > 6 else "")
            raise UseError(f"{name!r} matches {len(kinds)} kinds of tensors: {listed}. Name one of them")
        return Explanation(found[0].name, len(found) - 1, name, found[0].reasons)

    def diff(self, other: Plan) -> PlanDiff:
        """What another plan does differently: base values, tensors, and which tensors occur in one only."""
        if not isinstance(other, Plan):
            raise UseError(f"other is {other!r}: give a Plan, for example Plan.load(path)")
        pairs = {name: (getattr(self, key), getattr(other, key)) for key, name in _BASE_VALUES.items()}
        base = tuple(f"{name}: {change(one, two)}" for name, (one, two) in pairs.items() if one != two)
        same_size = self.size == other.size
        return PlanDiff(base, compare_rows(self.rows.values(), other.rows.values(), same_size=same_size))

    @exclusive()
    def build(self, seed: int = 0, *, device: str = "cpu") -> nn.Module:
        """The network at the target size, with weights drawn by the plan and its multipliers attached.

        >>> import theodolite as th
        >>> tokens = torch.zeros(1, 8, dtype=torch.long)
        >>> plan = th.plan(th.models.GPT, tokens, size=th.Size(256, 2), base=th.Size(64, 2), lr=2**-8)
        >>> round(plan.build(seed=0).readout.weight.std().item() * 64**0.5, 2)  # 1/√64 at base size, over 4
        0.25
        """
        if torch.device(device).type == "meta":
            raise UseError("device is meta, where tensors have no values: build on cpu or cuda")
        model = self._built(seed)
        return self._drawn(model, seed, self.match(model)).to(device)

    @exclusive()
    def initialize(self, model: nn.Module, seed: int = 0) -> nn.Module:
        """Draw the network's weights by the plan, in place, and attach its multipliers.

        The same seed gives the same numbers on every device, sharded or not. Buffers are left as they are,
        and so are tensors that are frozen or that nothing reads. Only the singular vectors that a spectral
        normalisation keeps of its weight are computed again.
        """
        refuse_hollow(self.match(model))
        needs_own = any(row.init.kind == "own" for row in self.rows.values())
        return self._drawn(model, seed, self.match(self._built(seed)) if needs_own else {})

    def attach(self, model: nn.Module) -> nn.Module:
        """Put the plan's multipliers on a network, in place of those of any other plan.

        Attaching twice changes nothing. Copies of the network have the multipliers too. A network that is
        built anew and gets its weights from a checkpoint needs this call, unless the multipliers are folded
        into it (`theodolite.surgery.bake`). In the whole process `torch.compile` is told to look at hooks
        (`skip_nnmodule_hook_guards`), and recompiles networks where they changed.
        """
        attach_multipliers(model, self.multipliers)
        return model

    def optimizer(
        self,
        model: nn.Module,
        *,
        skip: Sequence[str] = (),
        make: Make | None = None,
        check_gradients: bool = True,
    ) -> Optimizer:
        """One torch optimizer for all tensors, whatever the number of rules; attaches the multipliers.

        Args:
            model: the network.
            skip: patterns of tensors to leave out.
            make: turns parameter groups into an optimizer, for a rule of your own. What a matrix optimizer
                leaves to AdamW stays there.
            check_gradients: refuse a step along a gradient that is not finite, with the tensor's name. For
                this check a step waits for the device.
        """
        optimizer = super().optimizer(model, skip=skip, make=make, check_gradients=check_gradients)
        self.attach(model)
        return optimizer

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
        """A schedule that multiplies the learning rates of all groups by the same factor at every step.

        Args:
            optimizer: the optimizer of the plan.
            kind: as in `theodolite.optimizers.schedule`.
            steps: its length.
            warmup: steps of linear increase at the start.
            final: the last learning rate, as a fraction.
            tokens_per_step: targets in a step. With it the schedule is in tokens: its length is the tokens of
                the plan's size, and `warmup` is a number of tokens.
        """
        if tokens_per_step is not None:
            steps, warmup = self._steps(tokens_per_step, steps, warmup)
        spec = OPTIMIZERS.get(self.optimizer_name)
        if spec is not None and spec.averages and kind != "constant":
            raise UseError(
                f"{spec.name} replaces a schedule: it averages weights where others lower the learning rate. "
                "Leave the schedule out, or use constant with a warmup"
            )
        return schedule(optimizer, kind, steps=steps, warmup=warmup, final=final)

    def _steps(self, tokens_per_step: int, steps: int | None, warmup: int) -> tuple[int, int]:
        """Length and warmup in steps, from those in tokens."""
        if steps is not None:
            raise UseError("steps and tokens_per_step are both given: a schedule is in steps or in tokens")
        if self.size.tokens is None:
            raise UseError(
                f"the plan is for {self.size} and names no tokens, so that the length is not known: plan for "
                f"Size({self.size.width}, {self.size.depth}, tokens=…), or give steps"
            )
        each = arguments.whole("tokens_per_step", tokens_per_step, least=1)
        seen = arguments.whole("warmup", warmup, least=0)
        length = max(1, round(self.size.tokens / each))
        if seen and round(seen / each) >= length:
            raise UseError(f"warmup is {seen} tokens: it has to be less than the {self.size.tokens} in all")
        return length, round(seen / each)

    def to_dict(self) -> dict[str, Any]:
        """Everything but the build function and the inputs."""
        self._check()
        return {"version": VERSION, **super().to_dict()}

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> Self:
        """The plan from what `to_dict` gave; lists among the options become tuples."""
        version = content.get("version")
        if version != VERSION:
            raise UseError(
                f"it has version {version!r} of the format, and this is version {VERSION}. Plan again, or "
                "use the version of theodolite that wrote it"
            )
        plan = super().from_dict({name: value for name, value in content.items() if name != "version"})
        plan._check()
        return plan

    @classmethod
    def load(cls, path: str | Path, build: Build | None = None) -> Self:
        """Read a plan from JSON; `build` is what `plan.build` will call."""
        return replace(super().load(path), build_function=build)

    def _made_for(self) -> tuple[str, str]:
        return (
            f"the plan is for width {self.size.width}, depth {self.size.depth} and does not",
            "Plan for this network, or build the network at the plan's size",
        )

    def _built(self, seed: int) -> nn.Module:
        """The network as it initialises itself, on the CPU."""
        if self.build_function is None:
            own = next((name for name, row in self.rows.items() if row.init.kind == "own"), "")
            why = f", which {own} starts from" if own else ""
            raise UseError(f"the plan has no build function{why}: read it with Plan.load(path, build)")
        return build_model(self.build_function, self.size, seed=arguments.seed("seed", seed))

    def _drawn(self, model: nn.Module, seed: int, own: Mapping[str, Tensor]) -> nn.Module:
        """The network with weights by the plan; `own` holds values that it draws by itself."""
        draw_weights(self.rows, self.match(model), arguments.seed("seed", seed), own)
        fit_singular_vectors(model, seed)
        return self.attach(model)

    def _check(self) -> None:
        """Refuse values that no network can be drawn or trained with, or that no file can hold."""
        for name in ("lr", "weight_decay", "eps"):
            arguments.number(f"the plan: {name}", getattr(self, name), least=0, most=LARGEST)
        arguments.one_of("the plan: policy", self.policy, POLICIES)
        Horizon.of(self.horizon)
        Stretch.between(self.base, self.size)
        for name in ("options", "vector_options"):
            _check_option(getattr(self, name), f"the plan: {name}")
        for module, factor in self.multipliers.items():
            check_multiplier(factor, f"the plan: multipliers: {module}")
        for name, row in self.rows.items():
            where = f"the plan: rows: {name}"
            if row.name != name:
                raise UseError(f"{where}: name is {row.name!r}: give {name!r}")
            check_row(row, where, list(dict.fromkeys((self.optimizer_name, *OPTIMIZERS))))


def _check_option(value: Any, where: str) -> None:
    """Refuse an option that JSON cannot hold."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            _check_option(item, f"{where}: {name}")
    elif isinstance(value, tuple | list):
        for item in value:
            _check_option(item, where)
    elif value is None or isinstance(value, bool | str):
        return
    elif isinstance(value, int | float):
        arguments.number(where, value)
    else:
        raise UseError(
            f"{where} is a {type(value).__name__}: only numbers, texts and their lists can be saved"
        )


def refuse_hollow(tensors: Mapping[str, Tensor]) -> None:
    """Refuse to draw values of tensors that have no memory."""
    hollow = [name for name, tensor in tensors.items() if tensor.is_meta]
    if hollow:
        raise UseError(
            f"{hollow[0]} is on the meta device and has no memory to draw into ({len(hollow)} such "
            'tensors): call model.to_empty(device="cuda") first, and fill its buffers and frozen tensors'
        )
