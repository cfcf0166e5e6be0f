"""`Anatomy`: a Part for each parameter tensor and a Branch for each residual branch of a network."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self, get_args

from theodolite.anatomy.names import gather, ranges
from theodolite.core.errors import UseError
from theodolite.core.files import plain, read_dataclass
from theodolite.core.size import Size
from theodolite.present.result import Block, Result
from theodolite.present.text import Column, Table, counted

Role = Literal["input", "hidden", "output", "bias", "gain", "frozen", "unused"]
Norm = Literal["input", "output"]
Placement = Literal["pre", "post", "peri", "out", "inner", "none"]

ROLES: tuple[str, ...] = get_args(Role)
UNTRAINED: tuple[str, ...] = ("frozen", "unused")
"""The roles of tensors that are not trained: no rule applies to them, and a plan leaves them as they are."""


class AnatomyError(UseError):
    """The network cannot be dissected; the message names the reason."""


class UnclassifiedError(AnatomyError):
    """Tensors whose role cannot be found; the message names them and what to pass."""


@dataclass(frozen=True)
class Part:
    """One parameter tensor, and what the network does with it.

    A weight with input x and output y computes `y_o = Σ_i W_oi x_i`; `in_axes` and `out_axes` are the
    dimensions of `shape` that i and o run over. The kernel positions of a convolution count as i. Dimensions
    in neither are a stack of independent matrices, as in a mixture of experts.
    """

    name: str
    """Canonical: no `module.`, no `_orig_mod.`."""
    shape: tuple[int, ...]
    op: str
    """What is done with it: `linear`, `conv`, `embedding`, `concat`, `norm`, `scale` or `add`."""
    role: Role
    """By which fans grow with width: `input` (only out), `hidden` (both), `output` (only in); `bias` if it is
    added, `gain` if it multiplies elementwise. `frozen` if it requires no gradient, `unused` if nothing in
    the forward pass reads it."""
    fan_in: int
    fan_out: int
    width_in: bool
    """Does the input fan grow with width?"""
    width_out: bool
    """Does the output fan grow with width?"""
    in_axes: tuple[int, ...]
    out_axes: tuple[int, ...]
    grown_axes: tuple[int, ...] = ()
    """The dimensions that are larger at twice the width; for a ready module, those assumed to grow."""
    block: int | None = None
    """Residual block, counted from 0; None outside of every branch."""
    branch: int | None = None
    """Branch within the block, counted from 0."""
    ends_branch: bool = False
    """Does it end its branch? Scaling the tensors that end a branch scales what it adds to the stream."""
    branch_layers: int | None = None
    """The number of weights on the longest path through its branch."""
    norm: Norm | None = None
    """For a norm's gain: `input` if only linear maps read it, else `output`. For a vector that multiplies a
    weight: `input`, or `output` if the weight is also an embedding."""
    tied: tuple[str, ...] = ()
    """Other names of the same tensor; the operation of a second use that has no name of its own."""
    uses: tuple[str, ...] = ()
    """The kinds of its uses, first to last: a tied embedding is a `table` and a `weight`."""
    readout: tuple[str, ...] = ()
    """Of a table that is also a weight, as a tied readout: the names by which it is one; the operation where
    that use has no name of its own."""
    beside: str | None = None
    """Of a bias or gain: the last weight or table before it."""
    offset: float = 0.0
    """The number added to a gain before it multiplies: 1 for a zero-centred one, `(1 + γ)·x`."""
    scale_free: bool = False
    """Is it divided by a norm of itself before use, so that only its direction matters?"""
    rate: bool = False
    """Does it represent a rate by its logarithm, as time constants of state-space models do? It goes through
    exp, softplus or a sigmoid before use; for a bias, its sum does on the way to an exponent."""
    undecayed: bool = False
    """Does the network mark it as not to decay, by `_no_weight_decay` or `_optim["weight_decay"] = 0`?"""
    on_stream: bool = False
    """Does it change the residual stream itself, between branches: the γ of `γ·x + f(x)`, or the gain of a
    norm after the sum? Such changes accumulate over depth."""
    factor: float = 1.0
    """The product of the plain numbers that multiply the tensor and its output: up to the stream (for what
    ends a branch), the logits (for a readout, with the numbers on its input since the last norm, sum or
    nonlinearity) or the next layer. For a gain on a weight divided by a norm of itself, that weight counts as
    a number. 1 if unknown."""
    readout_factor: float = 1.0
    """Of a table that is also a readout: the same for the readout."""
    rows: tuple[tuple[tuple[int, int], ...], ...] = ()
    """Row blocks of a fused tensor (QKV, gate-up): for each block its half-open ranges along the output."""
    assumed: str = ""
    """Of a ready module: what the role rests on that only a second width can show, as a clause ("the number
    of key and value heads grows: …"). Empty where the dataflow tells the role."""

    @property
    def trained(self) -> bool:
        """Is it trained? Not if it is `frozen` or `unused`."""
        return self.role not in UNTRAINED

    @property
    def kind(self) -> Literal["weight", "gain", "bias"]:
        """What it does, trained or not."""
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
class AttentionHeads:
    """The attention of one branch, or of a softmax outside of every branch."""

    head_dim: int
    head_dim_grows: bool
    """Does the head dimension grow with width? Then the scale of the logits has to follow it."""
    scale: float | None
    """What the products of queries and keys are multiplied by; None if unknown."""
    scale_at_double_width: float | None
    """The same at twice the width; None if there is no wider network."""


@dataclass(frozen=True)
class Branch:
    """One residual branch: what one addition adds to the stream."""

    block: int
    branch: int
    placement: Placement
    """`pre` x + f(Nx), `post` N(x + f(x)), `peri` x + N f(N x), `out` x + N f(x), `inner` x + f(N g(x)),
    `none` x + f(x)."""
    layers: int
    """The number of weights on the longest path through the branch."""
    parts: tuple[str, ...]
    ends: tuple[str, ...]
    """The tensors that end the branch; none if no tensor sets the size of what it adds."""
    attention: AttentionHeads | None = None
    stream: int = 0
    """The residual stream it is added to, counted from 0: an encoder and a decoder have one each."""


class Anatomy(Result, Mapping[str, Part]):
    """A read-only mapping from canonical names to Parts, and the residual branches they form.

    `size` is None for a ready module: then nothing was compared across widths, and which fans
    grow is inferred from the dataflow alone.
    """

    kind: ClassVar[str] = "anatomy"
    loads: ClassVar[bool] = True

    def __init__(
        self,
        parts: Mapping[str, Part],
        branches: tuple[Branch, ...],
        size: Size | None = None,
        grown_blocks: int | Callable[[], int] | None = None,
        attention_outside: tuple[AttentionHeads, ...] = (),
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
    def attentions(self) -> tuple[AttentionHeads, ...]:
        """All attention: in branches, and outside of them, as in pooling by a learned query."""
        inside = (branch.attention for branch in self.branches if branch.attention is not None)
        return (*inside, *self.attention_outside)

    @property
    def num_blocks(self) -> int:
        """Number of residual blocks."""
        return len({branch.block for branch in self.branches})

    @property
    def grown_blocks(self) -> int | None:
        """Number of residual blocks at twice the depth; building that network waits until this is read."""
        if callable(self._grown_blocks):
            self._grown_blocks = self._grown_blocks()
        return self._grown_blocks

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_grown_blocks": self.grown_blocks}

    @property
    def num_parameters(self) -> int:
        """Number of elements in all Parts; a tied tensor counts once."""
        return sum(part.numel for part in self.values())

    def __repr__(self) -> str:
        return (
            f"<Anatomy of {len(self)} tensors, {self.num_parameters:,} parameters, {self.num_blocks} blocks>"
        )

    def blocks(self) -> Iterator[Block]:
        """A table in which equal tensors of equal blocks share a row."""
        size = f" at {self.size}" if self.size else ""
        yield (
            f"{self.num_parameters:,} parameters in {counted(len(self), 'tensor')}{size}, "
            f"{counted(self.num_blocks, 'residual block')}, {counted(len(self.branches), 'branch')}"
        )
        yield _table(fold(self.values()))
        if left := untrained(self.values()):
            yield f"{left}: not trained."
        yield "* grows with width    block.branch    ends: ends its branch    norms: who reads the gain"

    def table(self) -> Table:
        """A row for each tensor."""
        return _table([Fold(part.name, (part,)) for part in self.values()])

    def to_dict(self) -> dict[str, Any]:
        """Everything, as values that JSON knows; `grown_blocks` among it."""
        facts = _Facts(
            self.size, self.grown_blocks, self.branches, self.attention_outside, tuple(self.values())
        )
        return {"parameters": self.num_parameters, "blocks": self.num_blocks, **plain(facts)}

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> Self:
        """The Anatomy from what `to_dict` gave."""
        content = {name: value for name, value in content.items() if name not in ("parameters", "blocks")}
        facts: _Facts = read_dataclass(_Facts, content, "the anatomy")
        parts = {part.name: part for part in facts.parts}
        return cls(parts, facts.branches, facts.size, facts.blocks_at_double_depth, facts.attention_outside)


@dataclass(frozen=True)
class _Facts:
    """What is kept of an Anatomy."""

    size: Size | None
    blocks_at_double_depth: int | None
    branches: tuple[Branch, ...]
    attention_outside: tuple[AttentionHeads, ...]
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Fold:
    """Parts that differ only in their block: `blocks.*.attn.proj.weight`."""

    pattern: str
    parts: tuple[Part, ...]

    @property
    def part(self) -> Part:
        """The first of them."""
        return self.parts[0]

    @property
    def blocks(self) -> str:
        """The blocks they lie in, as ranges; empty outside of the blocks."""
        return ranges(part.block for part in self.parts if part.block is not None)

    @property
    def numel(self) -> int:
        """Elements in all of them."""
        return sum(part.numel for part in self.parts)


def fold(parts: Iterable[Part]) -> list[Fold]:
    """Group the parts that differ only in their block, in the order of their first members.

    >>> gain = Part("blocks.0.norm", (8,), "norm", "gain", 1, 8, False, True, (), (0,), block=0)
    >>> one, = fold([gain, dataclasses.replace(gain, name="blocks.1.norm", block=1, beside="blocks.0.out")])
    >>> one.pattern, one.blocks
    ('blocks.*.norm', '0–1')
    """
    folds = gather(parts, lambda part: dataclasses.replace(part, name="", block=None, tied=(), beside=None))
    return [Fold(pattern, members) for pattern, members in folds]


def assumed(anatomy: Anatomy) -> dict[str, tuple[str, ...]]:
    """What was assumed of a ready module: by clause, the names of the tensors whose roles rest on it.

    Empty for a build function, which shows at two widths what grows.

    >>> from torch import nn, zeros
    >>> from theodolite import dissect
    >>> layers = nn.Linear(9, 64), nn.ReLU(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 1)
    >>> assumed(dissect(nn.Sequential(*layers), zeros(2, 9)))
    {'a side that is more than 4 times smaller than the other grows too': ('2.weight',)}
    """
    found: dict[str, list[str]] = {}
    for part in anatomy.trained:
        if part.assumed:
            found.setdefault(part.assumed, []).append(part.name)
    return {clause: tuple(names) for clause, names in found.items()}


def untrained(parts: Iterable[Part]) -> str:
    """How many of the parts are not trained, and which; empty if all are trained.

    >>> table = Part("positions", (9, 8), "add", "frozen", 1, 8, False, True, (), (1,))
    >>> untrained([table, dataclasses.replace(table, name="spare", role="unused")])
    '1 tensor is frozen (positions), and 1 tensor is used by nothing in the forward pass (spare)'
    """
    held = list(parts)
    said = []
    for role, what in (("frozen", "frozen"), ("unused", "used by nothing in the forward pass")):
        if folds := fold(part for part in held if part.role == role):
            count = sum(len(one.parts) for one in folds)
            names = ", ".join(one.pattern for one in folds[:3]) + (", …" if len(folds) > 3 else "")
            said.append(f"{counted(count, 'tensor')} {'is' if count == 1 else 'are'} {what} ({names})")
    return ", and ".join(said)


def _table(folds: Iterable[Fold]) -> Table:
    columns = ("tensor", "role", Column("shape", side="right"), "block", "notes")
    rows = []
    for one in folds:
        place = f"{one.blocks}.{one.part.branch}" if one.part.block is not None else ""
        rows.append((one.pattern, one.part.role, _shape(one.part), place, _notes(one.part)))
    return Table(columns, rows)


def _shape(part: Part) -> str:
    """The shape, with a star on dimensions that grow with width."""
    sizes = [f"{size}*" if axis in part.grown_axes else str(size) for axis, size in enumerate(part.shape)]
    return "×".join(sizes) or "scalar"


def _notes(part: Part) -> str:
    notes = [] if part.op in ("linear", "norm", "add") or part.role == "unused" else [part.op]
    if part.ends_branch:
        notes.append("ends")
    if part.norm and part.op == "norm":
        notes.append(f"{part.norm} norm")
    if part.scale_free:
        notes.append("scale-free")
    if part.stack > 1 and part.role not in ("bias", "gain", "unused"):
        notes.append(f"stack of {part.stack}")
    if part.rows:
        sizes = [sum(stop - start for start, stop in block) for block in part.rows]
        notes.append(f"rows {'+'.join(map(str, sizes))}")
    if part.tied:
        notes.append(f"tied: {', '.join(part.tied)}")
    return ", ".join(notes)
