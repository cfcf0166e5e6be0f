"""What is in a network: one Part per parameter tensor, one Branch per residual branch."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from theodolite.core.errors import UseError
from theodolite.core.size import Size

Role = Literal["input", "hidden", "output", "bias", "gain", "frozen", "unused"]
Norm = Literal["input", "output"]
Placement = Literal["pre", "post", "peri", "out", "inner", "none"]

ROLES: tuple[str, ...] = get_args(Role)
LEFT_ALONE: tuple[str, ...] = ("frozen", "unused")
"""The roles of tensors that are not trained: no rule is for them, and a plan leaves them as they are."""


class AnatomyError(UseError):
    """A network that cannot be dissected; the message names what is in the way."""


class UnclassifiedError(AnatomyError):
    """Tensors whose role cannot be found by looking; the message names them and what to pass."""


@dataclass(frozen=True)
class Part:
    """One parameter tensor, and what the network does with it.

    A weight with input x and output y computes `y_o = Σ_i W_oi x_i`; `in_axes` and `out_axes` are the
    dimensions of `shape` that i and o run over (both, for a convolution's kernel positions, count as i).
    Dimensions in neither are a stack of independent matrices, as in a mixture of experts.
    """

    name: str
    """Canonical: no `module.`, no `_orig_mod.`."""
    shape: tuple[int, ...]
    op: str
    """What is done with it: `linear`, `conv`, `embedding`, `concat`, `norm`, `scale` or `add`."""
    role: Role
    """By which fans grow with width: `input` (only out), `hidden` (both), `output` (only in);
    `bias` if it is added, `gain` if it multiplies elementwise. `frozen` if it takes no gradient, `unused` if
    nothing in the forward pass reads it."""
    fan_in: int
    fan_out: int
    width_in: bool
    """Does the input fan grow with width?"""
    width_out: bool
    """Does the output fan grow with width?"""
    in_axes: tuple[int, ...]
    out_axes: tuple[int, ...]
    grown_axes: tuple[int, ...] = ()
    """The dimensions that are larger at twice the width; of a ready module, those taken to grow."""
    block: int | None = None
    """Residual block, counted from 0; None outside of every branch."""
    branch: int | None = None
    """Branch within the block, counted from 0."""
    ends_branch: bool = False
    """Scaling the tensors that end a branch scales what the branch adds to the stream."""
    branch_layers: int | None = None
    """Weights on the longest path through its branch."""
    norm: Norm | None = None
    """For a norm's gain: `input` if only linear maps read it, else `output`. A vector that multiplies a
    weight is read by that linear map alone: `input`, or `output` if the weight is an embedding too."""
    tied: tuple[str, ...] = ()
    """Other names of the same tensor; an operation's name where a second use has no name of its own."""
    uses: tuple[str, ...] = ()
    """The kinds of its uses, first to last: an embedding that is the head too is a `table` and a `weight`."""
    readout: tuple[str, ...] = ()
    """Of a table that is a weight too, as a tied readout: the names by which it is one; an operation's name
    where that use has no name of its own."""
    beside: str | None = None
    """Of a bias or gain: the last weight or table before it, whose output it is added to or multiplies."""
    offset: float = 0.0
    """What is added to a gain before it multiplies: 1 for a zero-centred one, `(1 + γ)·x`."""
    scale_free: bool = False
    """Is it divided by a norm of itself before it is used, so that only its direction counts?"""
    rate: bool = False
    """Does it stand for a rate by its logarithm, as time constants of state-space models do? It goes through
    exp, softplus or a sigmoid before it is used; or, of a bias, its sum does on the way to an exponent."""
    undecayed: bool = False
    """Does the network mark it as not to decay, by `_no_weight_decay` or `_optim["weight_decay"] = 0`?"""
    on_stream: bool = False
    """Does it change the residual stream itself, between branches: the γ of `γ·x + f(x)`, or the gain of a
    norm after the sum? Such changes add up over depth."""
    factor: float = 1.0
    """The product of the plain numbers the tensor and its output are multiplied by: up to the stream (what
    ends a branch), the logits (a readout; numbers on its input since the last norm or sum count too) or the
    next layer. A weight divided by a norm of itself counts as a number for the gain on it. 1 where it cannot
    be told."""
    readout_factor: float = 1.0
    """Of a table that is a readout too: the same for the readout."""
    rows: tuple[tuple[tuple[int, int], ...], ...] = ()
    """Row blocks of a fused tensor (QKV, gate-up): for each block its half-open ranges along the output."""

    @property
    def trained(self) -> bool:
        """Is there a gradient to train it with? Not if it is `frozen` or `unused`."""
        return self.role not in LEFT_ALONE

    @property
    def kind(self) -> Literal["weight", "gain", "bias"]:
        """What it does, be it trained or not."""
        does = self.role if self.trained else next(iter(self.uses), "")
        return "gain" if does == "gain" else "bias" if does == "bias" else "weight"

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def stack(self) -> int:
        """Number of independent matrices in the tensor: 1, or the number of experts."""
        inside = {*self.in_axes, *self.out_axes}
        return math.prod(size for axis, size in enumerate(self.shape) if axis not in inside)


@dataclass(frozen=True)
class Attention:
    """How one branch attends, or a softmax outside of every branch."""

    head_dim: int
    head_dim_grows: bool
    """Does the head dimension grow with width? Then the logits' scale has to follow it."""
    scale: float | None
    """What the products of queries and keys are multiplied by; None where the trace does not show it."""
    scale_at_double_width: float | None
    """The same at twice the width; None where there was nothing to compare with."""


@dataclass(frozen=True)
class Branch:
    """One residual branch: what is added to the stream in one place."""

    block: int
    branch: int
    placement: Placement
    """`pre` x + f(Nx), `post` N(x + f(x)), `peri` x + N f(N x), `out` x + N f(x), `inner` x + f(N g(x)),
    `none` x + f(x)."""
    layers: int
    """Weights on the longest path through the branch."""
    parts: tuple[str, ...]
    ends: tuple[str, ...]
    """The tensors that end the branch; none, if no tensor sets the size of what it adds."""
    attention: Attention | None = None
    stream: int = 0
    """The residual stream it is added to, counted from 0: an encoder and a decoder have one each."""


class Anatomy(Mapping[str, Part]):
    """A read-only table of Parts by canonical name, and the residual branches they form.

    `size` is None for a ready module: then nothing was compared across widths, and which fans
    grow is inferred from the dataflow alone.
    """

    def __init__(
        self,
        parts: Mapping[str, Part],
        branches: tuple[Branch, ...],
        size: Size | None = None,
        grown_blocks: int | Callable[[], int] | None = None,
        attention_outside: tuple[Attention, ...] = (),
    ) -> None:
        self._parts = dict(parts)
        self.branches = branches
        self.attention_outside = attention_outside
        self.size = size
        self._grown_blocks = grown_blocks

    def __getitem__(self, name: str) -> Part:
        try:
            return self._parts[name]
        except KeyError:
            raise KeyError(f"{name!r} is not a parameter of this network") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    @property
    def trained(self) -> tuple[Part, ...]:
        """The Parts that are neither `frozen` nor `unused`."""
        return tuple(part for part in self.values() if part.trained)

    @property
    def attentions(self) -> tuple[Attention, ...]:
        """All that attend: branches, and what attends outside of them, as pooling by a learned query does."""
        inside = (branch.attention for branch in self.branches if branch.attention is not None)
        return (*inside, *self.attention_outside)

    @property
    def num_blocks(self) -> int:
        """Number of residual blocks."""
        return len({branch.block for branch in self.branches})

    @property
    def grown_blocks(self) -> int | None:
        """Number of residual blocks at twice the depth; the network is built there once this is asked."""
        if callable(self._grown_blocks):
            self._grown_blocks = self._grown_blocks()
        return self._grown_blocks

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_grown_blocks": self.grown_blocks}

    @property
    def num_parameters(self) -> int:
        """Number of elements in all Parts; a tied tensor counts once."""
        return sum(part.numel for part in self.values())

    def __str__(self) -> str:
        from theodolite.anatomy.table import table

        return table(self)

    def __repr__(self) -> str:
        return (
            f"<Anatomy of {len(self)} tensors, {self.num_parameters:,} parameters, {self.num_blocks} blocks>"
        )

    def to_json(self) -> str:
        """Everything, as JSON."""
        facts: dict[str, Any] = {
            "size": dataclasses.asdict(self.size) if self.size else None,
            "parameters": self.num_parameters,
            "blocks": self.num_blocks,
            "blocks_at_double_depth": self.grown_blocks,
            "branches": [dataclasses.asdict(branch) for branch in self.branches],
            "attention_outside": [dataclasses.asdict(one) for one in self.attention_outside],
            "parts": [dataclasses.asdict(part) for part in self.values()],
        }
        return json.dumps(facts, indent=2)
