"""`Groups`: which optimizer trains which tensor of a network as it is, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.optim import Optimizer

from theodolite.core.errors import UseError
from theodolite.core.size import Size
from theodolite.optimizers.spec import Make
from theodolite.planning.caveats import WARNING
from theodolite.planning.per_tensor import PerTensor
from theodolite.planning.rows import PlanRow, count_groups, fold_rows, trained_tensors
from theodolite.planning.splitting import Split, split_groups
from theodolite.planning.translation import MUONS, Translation, factor, scale_of, shape_seen, translate
from theodolite.present.result import Block
from theodolite.present.text import Column, Table, counted, number


@dataclass(frozen=True)
class Groups(PerTensor):
    """Which optimizer trains each tensor, with its learning rate and decay. Made by `theodolite.groups`.

    The network stays as it is: its initial values are kept, and nothing is scaled from another size.
    """

    kind: ClassVar[str] = "parameter groups"
    loads: ClassVar[bool] = True
    _noun: ClassVar[str] = "groups"

    network: str
    """The class of the network, or the function that builds it."""
    size: Size | None
    """None for a ready module."""
    optimizer_name: str
    lr: float
    """The learning rate that was given, of the optimizer or of AdamW."""
    from_adamw: bool
    """Was AdamW's learning rate given? Then a matrix optimizer has one for each shape."""
    vector_lr: float
    """Of the AdamW beside a matrix optimizer."""
    weight_decay: float
    eps: float
    vector_eps: float
    policy: str
    options: Mapping[str, Any]
    vector_options: Mapping[str, Any]
    rows: Mapping[str, PlanRow]
    multipliers: Mapping[str, float] = field(default_factory=dict)
    """None: the forward pass stays as it is."""
    notes: tuple[str, ...] = ()
    """What was assumed, and what to know beside the numbers."""
    model: nn.Module | None = field(default=None, compare=False, repr=False)
    """The module that was given, if it was one; not saved."""

    @property
    def title(self) -> str:
        """The optimizers and the network."""
        counts = Counter(row.rule for row in self.trained)
        rest = f", {' and '.join(sorted(set(counts) - {self.optimizer_name}))} for the rest"
        beside = rest if len(counts) > 1 else ""
        return f"{self.optimizer_name}{beside}: {self.network}{f' at {self.size}' if self.size else ''}"

    def blocks(self) -> Iterator[Block]:
        """The optimizers, a table of the tensors, and notes."""
        rules = [self.optimizer_name, *(row.rule for row in self.trained)]
        counts = {rule: sum(row.rule == rule for row in self.trained) for rule in dict.fromkeys(rules)}
        held = " and ".join(f"{counted(count, 'tensor')} by {rule}" for rule, count in counts.items())
        groups = counted(count_groups(self.trained, self._options()), "group")
        yield f"{self.title}\n{held}, in {groups}"
        yield from (note for note in self.notes if note.startswith(WARNING))
        yield groups_table(self.rows.values(), folded=True)
        yield from (note for note in self.notes if not note.startswith(WARNING))

    def table(self) -> Table:
        """A line for each tensor."""
        return groups_table(self.rows.values(), folded=False)

    def match(self, model: nn.Module | None = None) -> dict[str, Tensor]:
        """The network's tensors by canonical name; by default those of the module that was given."""
        return super().match(self._model(model))

    def param_groups(
        self, model: nn.Module | None = None, *, skip: Sequence[str] = ()
    ) -> list[dict[str, Any]]:
        """Plain parameter groups, equal rows merged. `skip` holds patterns of tensors to leave out.

        Beside `params`, `param_names`, `lr` and `weight_decay` a group has a `name` for loggers, the
        optimizer as its `rule`, and the options of that optimizer: Muon's are `scale`, `axes` and `rows`.

        Args:
            model: the network; needed where the groups were made from a build function.
            skip: patterns of tensors to leave out.
        """
        return super().param_groups(self._model(model), skip=skip)

    def optimizer(
        self,
        model: nn.Module | None = None,
        *,
        skip: Sequence[str] = (),
        make: Make | None = None,
        check_gradients: bool = True,
    ) -> Optimizer:
        """One torch optimizer for all tensors: Muon, with AdamW for the rest.

        Args:
            model: the network; needed where the groups were made from a build function.
            skip: patterns of tensors to leave out.
            make: turns the parameter groups of the optimizer that was named into another optimizer.
            check_gradients: refuse a step along a gradient that is not finite, with the tensor's name. For
                this check a step waits for the device.
        """
        return super().optimizer(self._model(model), skip=skip, make=make, check_gradients=check_gradients)

    def split(self, model: nn.Module | None = None, *, skip: Sequence[str] = ()) -> Split:
        """The groups for `torch.optim.Muon` and `torch.optim.AdamW`: `muon, adamw = groups.split()`.

        Each group has the learning rate, decay and `adjust_lr_fn` with which torch's Muon makes the step of
        the groups. It takes tensors of two dimensions only: kernels and experts go to AdamW. It takes fused
        matrices as one. The notes name these tensors.

        Args:
            model: the network; needed where the groups were made from a build function.
            skip: patterns of tensors to leave out.
        """
        if self.optimizer_name not in MUONS:
            raise UseError(
                f"split is for Muon, which torch has: one of {', '.join(MUONS)}. These groups are for "
                f"{self.optimizer_name}: use groups.optimizer(model)"
            )
        tensors = trained_tensors(self.trained, self.match(model), skip, self._noun)
        return split_groups(self.rows, tensors, self._as_adamw, self.options, self.vector_options)

    @property
    def translation(self) -> Translation:
        """AdamW's learning rate and those of Muon that move the hidden weights alike, by shape."""
        if self.optimizer_name not in ("adamw", *MUONS):
            raise UseError(
                f"translation is between AdamW and Muon, and these groups are for {self.optimizer_name}"
            )
        return translate(row for row in self.trained if row.role == "hidden" or scale_of(row) is not None)

    def _as_adamw(self, row: PlanRow) -> PlanRow:
        """A row of Muon's as AdamW's, at the learning rate of AdamW that it comes from, if it does."""
        lr = self.lr if self.from_adamw else self.vector_lr
        decay = self.weight_decay / lr if self.policy == "independent" else self.weight_decay
        return replace(
            row,
            rule="adamw",
            lr=lr,
            eps=self.vector_eps,
            weight_decay=decay if row.weight_decay else 0.0,
        )

    def _model(self, model: nn.Module | None) -> nn.Module:
        if model is None:
            model = self.model
        if model is None:
            raise UseError(
                "these groups hold no network: they were made from a build function or read from a file. "
                "Give the network: groups.optimizer(model)"
            )
        return model

    def _made_for(self) -> tuple[str, str]:
        at = f" at {self.size}" if self.size else ""
        return (
            f"the groups are for {self.network}{at} and do not",
            "Make groups of this network: theodolite.groups(model, …)",
        )


def groups_table(rows: Iterable[PlanRow], *, folded: bool) -> Table:
    """The rows as a table; `folded` puts equal rows whose names differ only in numbers into one line."""
    rows = list(rows)

    any_decay = any(row.weight_decay for row in rows)

    def cells(row: PlanRow) -> tuple[str | float | None, ...]:
        why = row.reasons["why"] + " (assumed)" * ("assumed" in row.reasons)
        if not row.trained:
            return (row.role, None, shape_seen(row), None, None, None, why)
        decay = row.weight_decay if any_decay else None
        return (row.role, row.rule, shape_seen(row), factor(row), row.lr, decay, why)

    numbers = [Column(name, show=_digits, side="right") for name in ("lr", "decay")]
    lines = fold_rows(rows, cells) if folded else [(row.name, (row,)) for row in rows]
    return Table(
        ("tensor", "role", "optimizer", "shape", "factor", *numbers, "why"),
        [(pattern, *cells(members[0])) for pattern, members in lines],
    )


def _digits(value: float | None) -> str:
    return "" if value is None else number(value)
