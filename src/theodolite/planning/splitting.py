"""`split`: groups for `torch.optim.Muon` and `torch.optim.AdamW`, whose steps are those of the groups' rules.

torch's Muon orthogonalises a whole tensor of two dimensions as it is stored, (A, B), and moves it by
`lr·a·UVᵀ`, where a is `√max(1, A/B)` or, with `match_rms_adamw`, `0.2·√max(A, B)`. Its decay takes
`lr·weight_decay`, without a. So a step is ours if `lr·a` is our `lr·s` and `lr·weight_decay` is the same. A
transposed matrix has the transposed `UVᵀ`, and nothing is lost. The matrices of a fused tensor are
orthogonalised as one: that is another step, and is given the same root mean square. Tensors of other
dimensions go to AdamW.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from theodolite.optimizers import OPTIMIZERS
from theodolite.optimizers.muon import SCALES
from theodolite.planning.exporting.muon_steps import Seen, step_for
from theodolite.planning.rows import PlanRow, fold_rows, param_groups
from theodolite.planning.translation import scale_of
from theodolite.present.result import Block, Result
from theodolite.present.text import Column, Table, counted, number

_NAMES = {"steps": "ns_steps"}
"""Options that torch's Muon calls by another name."""


@dataclass(frozen=True)
class Split(Result):
    """Parameter groups for torch's Muon and AdamW: `muon, adamw = groups.split()`. Made by `Groups.split`."""

    kind: ClassVar[str] = "split"

    muon: list[dict[str, Any]] = field(repr=False)
    """For `torch.optim.Muon(…)`."""
    adamw: list[dict[str, Any]] = field(repr=False)
    """For `torch.optim.AdamW(…)`."""
    notes: tuple[str, ...]
    """Where a step of torch differs from that of the groups."""

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        return iter((self.muon, self.adamw))

    def blocks(self) -> Iterator[Block]:
        """The groups, and notes."""
        yield self.table()
        yield from self.notes

    def table(self) -> Table:
        """A line for each group."""
        numbers = [Column(name, show=_digits, side="right") for name in ("lr", "weight_decay")]
        lines = [
            (
                name,
                group["name"],
                counted(len(group["params"]), "tensor"),
                group["lr"],
                group["weight_decay"],
                group.get("adjust_lr_fn"),
            )
            for name, groups in (("Muon", self.muon), ("AdamW", self.adamw))
            for group in groups
        ]
        return Table(("torch.optim", "group", "tensors", *numbers, "adjust_lr_fn"), lines)

    def to_dict(self) -> dict[str, Any]:
        """The names and options of the groups, without the tensors."""
        muon, adamw = (
            [{key: value for key, value in group.items() if key != "params"} for group in groups]
            for groups in self
        )
        return {"muon": muon, "adamw": adamw, "notes": list(self.notes)}


def _digits(value: float) -> str:
    return number(value)


def split_groups(
    rows: Mapping[str, PlanRow],
    tensors: Mapping[str, Tensor],
    as_adamw: Callable[[PlanRow], PlanRow],
    options: Mapping[str, Any],
    vector_options: Mapping[str, Any],
) -> Split:
    """The groups of some tensors.

    Args:
        rows: of all tensors.
        tensors: those to split, by name.
        as_adamw: the row of a tensor that torch's Muon does not take, as one of AdamW's.
        options: of Muon.
        vector_options: of AdamW.
    """
    OPTIMIZERS["muon"].maker(options)  # refuses what is no option of it
    OPTIMIZERS["adamw"].maker(vector_options)
    own = {name: rows[name] for name in tensors if scale_of(rows[name]) is not None}
    taken = {name: row for name, row in own.items() if len(row.shape) == 2}
    left = {name: rows[name] for name in tensors if name not in own}
    left |= {name: as_adamw(row) for name, row in own.items() if name not in taken}
    adamw = {name: tensors[name] for name in tensors if name in left}
    return Split(
        _muon_groups(taken, tensors, options),
        param_groups(left, adamw, {"adamw": vector_options}),
        tuple(_notes(own, left)),
    )


def _muon_groups(
    rows: Mapping[str, PlanRow], tensors: Mapping[str, Tensor], options: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Groups of torch's Muon, equal ones merged."""
    common = {_NAMES.get(option, option): value for option, value in options.items()}
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for name, row in rows.items():
        own = _muon_options(row)
        group = found.setdefault(tuple(own.values()), {"params": [], "param_names": [], **common, **own})
        group["params"].append(tensors[name])
        group["param_names"].append(name)
    for group in found.values():
        group["name"] = "hidden" if len(found) == 1 else f"hidden:{group['param_names'][0]}"
    return list(found.values())


def _muon_options(row: PlanRow) -> dict[str, Any]:
    """The options with which torch's Muon moves a matrix as the row says."""
    scale = scale_of(row)
    assert scale is not None
    stored_out, stored_in = row.shape
    adjust = "match_rms_adamw" if scale == "rms" else "original"
    theirs = SCALES["rms" if scale == "rms" else "original"](stored_in, stored_out)
    step = step_for(row, [Seen(1, stored_in, stored_out, theirs)])
    return {"lr": step.lr, "weight_decay": step.weight_decay, "adjust_lr_fn": adjust, "eps": row.eps}


def _notes(own: Mapping[str, PlanRow], left: Mapping[str, PlanRow]) -> Iterator[str]:
    """Where torch's step differs from the rule's, or its learning rate does for the same step."""
    taken = [row for name, row in own.items() if name not in left]
    if moved := [left[name] for name in own if name in left]:
        yield (
            f"torch's Muon takes tensors of two dimensions only: AdamW gets {_patterns(moved)}, at lr "
            f"{number(moved[0].lr)}. groups.optimizer() trains them by Muon, each matrix by itself."
        )
    if fused := [row for row in taken if row.rows]:
        yield (
            f"torch's Muon orthogonalises the {len(fused[0].rows)} matrices of {_patterns(fused)} as one. "
            "The step has the same RMS and another direction. groups.optimizer() takes each by itself."
        )
    if turned := [row for row in taken if row.out_axes != (0,)]:
        yield f"{_patterns(turned)}: stored as (in, out), which gives the same step."
    if any(scale_of(row) != "rms" and _muon_options(row)["lr"] != row.lr for row in taken):
        yield (
            "torch's Muon multiplies by √max(1, A/B) of the stored shape A×B: where the groups have another "
            "scale, lr makes up for that, and weight_decay keeps lr·weight_decay."
        )


def _patterns(rows: Iterable[PlanRow]) -> str:
    """Their names, folded."""
    return ", ".join(dict.fromkeys(pattern for pattern, _ in fold_rows(rows, lambda row: None)))
