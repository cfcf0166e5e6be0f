"""Scale vectors: the gains of Input-Norms, the linear maps that read them, and how they grow in training.

A map that reads a gain γ has the effective matrix `A = W diag γ`. In a network converted by surgery
`A = diag(b) W diag γ`, and each map may have vectors of its own.

Gradient flow conserves `c_j = γ_j² − ‖w_j‖²`, so `γ_j² = (c_j + √(c_j² + 4‖a_j‖²))/2` rises with the
effective column `a_j = γ_j w_j`, and with it the speed `γ_j² + ‖w_j‖² = √(c_j² + 4‖a_j‖²)` at which the
column learns. Weight decay, noise and optimizers other than gradient descent depart from it. The law is
that of a plain vector; there is none for a magnitude times a direction, and nothing is predicted.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from theodolite.anatomy.names import unwrap
from theodolite.anatomy.part import AnatomyError
from theodolite.core.errors import UseError
from theodolite.core.exclusive import exclusive
from theodolite.present.result import Block, Result
from theodolite.present.text import Column, Table, number
from theodolite.surgery.edits import Edits, Held, held, scaled_weights
from theodolite.surgery.fold_map import along
from theodolite.surgery.folding import fold_gains
from theodolite.surgery.gains import GainReader, NormGain, SurgeryError


@dataclass(frozen=True, eq=False)
class ScaledMap:
    """One linear map, and where the network holds it."""

    weight: str
    """Canonical name before surgery."""
    reader: GainReader
    place: NormGain
    held: Held
    gain: Held

    @property
    def raw(self) -> Tensor:
        """W, without the vectors of surgery."""
        if parametrize.is_parametrized(self.held.module, self.held.attribute):
            lists: Any = self.held.module.parametrizations
            original: Tensor = lists[self.held.attribute].original
            return original
        return self.held.tensor

    def effective(self) -> Tensor:
        """A, with its graph."""
        if not self.reader.channels:  # surgery has set the norm's gain to one
            return self.held.tensor
        return self.held.tensor * along(self.reader, self.gamma(), nothing=1.0)

    def gamma(self) -> Tensor:
        """The factor of the norm itself."""
        return self.gain.tensor.reshape(-1) + self.place.offset


@dataclass(frozen=True, eq=False)
class ScaleVector:
    """One scale vector γ with the columns that it multiplies."""

    name: str
    maps: tuple[str, ...]
    """The weights whose columns they are."""
    gain_squares: Tensor
    """γ_j², float64; one row for each expert with a vector of its own."""
    weight_squares: Tensor
    """‖w_j‖² over all the rows that γ_j multiplies."""
    obstacle: str = ""
    """Why columns do not learn by `P_j = γ_j²I + w_j w_jᵀ`; empty if they do."""

    @property
    def speeds(self) -> Tensor:
        """`γ_j² + ‖w_j‖²`, the largest eigenvalue of P_j (the others are γ_j²); nan with an obstacle."""
        return self._known(self.gain_squares + self.weight_squares)

    @property
    def balance(self) -> Tensor:
        """`γ_j² − ‖w_j‖²`, which gradient flow conserves; nan if there is an obstacle."""
        return self._known(self.gain_squares - self.weight_squares)

    def _known(self, values: Tensor) -> Tensor:
        return torch.full_like(values, torch.nan) if self.obstacle else values


@dataclass(frozen=True)
class AmplificationRow:
    """One scale vector at one step, as means over its columns; nan where a law does not hold for it."""

    step: int
    vector: str
    gain: float
    """γ_j²."""
    weight: float
    """‖w_j‖²."""
    speed: float
    """`γ_j² + ‖w_j‖²`."""
    flow: float
    """`√(c_j² + 4‖a_j‖²)`: the speed if c_j had stayed as it was at the first record."""
    balance: float
    """`γ_j² − ‖w_j‖²`."""


@dataclass
class Amplification(Result):
    """The scale vectors of a network in training. Made by `amplification`.

    Call `record(step)` every so many steps; it reads parameters and changes nothing.
    """

    kind: ClassVar[str] = "amplification"
    model: nn.Module = field(repr=False, compare=False)
    maps: tuple[ScaledMap, ...] = field(repr=False, compare=False)
    rows: list[AmplificationRow] = field(default_factory=list)
    _first: dict[str, Tensor] = field(default_factory=dict, repr=False, compare=False)

    @exclusive()
    def record(self, step: int) -> tuple[AmplificationRow, ...]:
        """Read all vectors now, and keep what was read."""
        if self.rows and step <= self.rows[-1].step:
            raise UseError(f"step is {step}, and the last record was at {self.rows[-1].step}: steps go up")
        found = tuple(self._read(step, one) for one in find_vectors(self.model, self.maps))
        self.rows += found
        return found

    @property
    def vectors(self) -> tuple[str, ...]:
        """The names of the scale vectors."""
        return tuple(dict.fromkeys(row.vector for row in self.rows))

    def curve(self, vector: str) -> tuple[AmplificationRow, ...]:
        """All records of one vector."""
        if vector not in self.vectors:
            raise UseError(f"there is no record of a vector {vector!r}: there are {', '.join(self.vectors)}")
        return tuple(row for row in self.rows if row.vector == vector)

    def blocks(self) -> Iterator[Block]:
        """The first record and the last."""
        if not self.rows:
            yield "nothing is recorded yet: call record(step)"
            return
        pair = [Column(name, side="right") for name in ("steps", "γ²", "γ²+‖w‖²", "by flow", "γ²−‖w‖²")]
        rows = []
        for vector in self.vectors:
            curve = self.curve(vector)
            first, last = curve[0], curve[-1]
            gain, speed, balance = (
                _change(getattr(first, name), getattr(last, name)) for name in ("gain", "speed", "balance")
            )
            steps = f"{first.step} → {last.step}"
            rows.append((vector, steps, gain, speed, number(last.flow), balance))
        yield Table(("scale vector", *pair), rows)
        yield obstacles(find_vectors(self.model, self.maps))

    def table(self) -> Table:
        """Every record of every vector."""
        columns = ("step", "scale vector", "γ²", "‖w‖²", "γ²+‖w‖²", "by flow", "γ²−‖w‖²")
        return Table(columns, [astuple(row) for row in self.rows])

    @torch.no_grad()
    def _read(self, step: int, one: ScaleVector) -> AmplificationRow:
        start = self._first.setdefault(one.name, one.balance.clone())
        flow = (start.square() + 4 * one.gain_squares * one.weight_squares).sqrt()  # ‖a_j‖² = γ_j²‖w_j‖²
        columns = one.gain_squares, one.weight_squares, one.speeds, flow, one.balance
        return AmplificationRow(step, one.name, *(values.mean().item() for values in columns))


@exclusive()
def amplification(model: nn.Module, inputs: Any) -> Amplification:
    """Follow the scale vectors of a network's Input-Norms during training.

    Args:
        model: any module that `theodolite.dissect` understands, converted by `theodolite.surgery` or not.
        inputs: what it is called with.

    >>> import theodolite as th
    >>> torch.manual_seed(0)
    <...>
    >>> model = nn.Sequential(nn.RMSNorm(8), nn.Linear(8, 8, bias=False)).double()
    >>> x = torch.randn(64, 8).double()
    >>> found, optimizer = amplification(model, x), torch.optim.SGD(model.parameters(), lr=0.01)
    >>> for step in range(201):
    ...     if step % 100 == 0:
    ...         _ = found.record(step)
    ...     (model(x) - 3 * x).square().sum(1).mean().backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    >>> first, _, last = found.curve("0.weight")
    >>> last.speed > 2 * first.speed, abs(last.speed / last.flow - 1) < 0.01
    (True, True)
    """
    inner = unwrap(model)
    return Amplification(inner, find_maps(inner, inputs))


def find_maps(model: nn.Module, inputs: Any) -> tuple[ScaledMap, ...]:
    """Every linear map that reads a norm's gain, if only linear maps read it, by dataflow.

    Found on a copy with meta tensors and folded vectors; on a real copy if that cannot be traced.
    """
    try:
        try:
            done = fold_gains(_copied(model, hollow=True), inputs, Edits())
        except AnatomyError:
            done = fold_gains(_copied(model, hollow=False), inputs, Edits())
    except SurgeryError as error:
        raise UseError(f"{type(model).__name__} has no scale vector to measure: {error}") from error
    return tuple(
        ScaledMap(reader.weight, reader, one.gain, held(model, reader.weight), held(model, one.gain.name))
        for one in done.maps
        for reader in one.gain.readers
    )


@torch.no_grad()
def find_vectors(model: nn.Module, maps: Sequence[ScaledMap]) -> tuple[ScaleVector, ...]:
    """The scale vectors of these maps: the norms' own, or those that surgery put into the weights."""
    converted = scaled_weights(model)
    found: list[ScaleVector] = []
    shared: dict[str, list[ScaledMap]] = {}
    for one in maps:
        if one.weight in converted and converted[one.weight][1].inputs:
            found += _own_vectors(one, converted[one.weight][1])
        else:
            shared.setdefault(one.place.name, []).append(one)
    for name, readers in shared.items():
        gamma = readers[0].gamma().double()
        squares = torch.zeros_like(gamma)
        for one in readers:  # ‖w_j‖² over rows and stacked matrices, at the entry of γ that input j reads
            others = [axis for axis in range(one.raw.dim()) if axis != one.reader.shape.in_axis]
            channels = torch.tensor(one.reader.channels, device=gamma.device)
            columns = one.raw.double().square().sum(others)
            squares.index_add_(0, channels[channels >= 0], columns[channels >= 0])
        weights = tuple(one.weight for one in readers)
        outputs = any(name in converted and converted[name][1].outputs for name in weights)
        plain = not parametrize.is_parametrized(readers[0].gain.module, readers[0].gain.attribute)
        trained = [readers[0].gain.tensor, *(one.raw for one in readers)]
        found.append(ScaleVector(name, weights, gamma.square(), squares, _obstacle(plain, trained, outputs)))
    return tuple(found)


def obstacles(vectors: Sequence[ScaleVector]) -> str:
    """For how many vectors numbers are left out, and why, as lines."""
    found = Counter(one.obstacle for one in vectors if one.obstacle)
    return "\n".join(f"– for {count} of {len(vectors)} scale vectors: {why}." for why, count in found.items())


@contextlib.contextmanager
def replaced(values: Mapping[Held, Tensor]) -> Iterator[None]:
    """Let the network use other tensors in these places, parametrized or not."""
    handles, before = [], []
    try:
        for where, value in values.items():
            if parametrize.is_parametrized(where.module, where.attribute):
                lists: Any = where.module.parametrizations
                handles.append(lists[where.attribute].register_forward_hook(lambda *_, value=value: value))
                continue
            parameters, buffers = where.module._parameters, where.module._buffers
            registry: dict[str, Any] = parameters if where.attribute in parameters else buffers
            before.append((registry, where.attribute, registry[where.attribute]))
            registry[where.attribute] = value
        yield
    finally:
        for handle in handles:
            handle.remove()
        for registry, attribute, tensor in before:
            registry[attribute] = tensor


def _copied(model: nn.Module, *, hollow: bool) -> nn.Module:
    tensors = [*model.parameters(), *model.buffers()] if hollow else []
    empty = {id(each): each.detach().to("meta") for each in tensors}
    for each in model.parameters() if hollow else ():
        empty[id(each)] = nn.Parameter(empty[id(each)], each.requires_grad)
    return copy.deepcopy(model, dict[int, Any](empty))


def _own_vectors(one: ScaledMap, how: Any) -> Iterator[ScaleVector]:
    shape, weight = one.reader.shape, one.raw.double()
    for block, vector in enumerate(how.inputs):
        rows = torch.cat([torch.arange(*each) for each in shape.rows[block]]).to(weight.device)
        mine = weight.index_select(shape.out_axis, rows)
        name = one.weight if len(how.inputs) == 1 else f"{one.weight}[{block}]"
        squares = vector().double().square(), mine.square().sum(shape.out_axis)
        obstacle = _obstacle(vector.form == "plain", [*vector.parameters(), one.raw], bool(how.outputs))
        yield ScaleVector(name, (one.weight,), *squares, obstacle)


def _obstacle(plain: bool, trained: Sequence[Tensor], outputs: bool) -> str:
    if not all(tensor.requires_grad for tensor in trained):
        return "the gain or a weight is frozen"
    if not plain:
        return "γ is a magnitude times a direction, and these are what is trained"
    return "a vector on the output side moves the columns too" if outputs else ""


def _change(first: float, last: float) -> str:
    return "–" if math.isnan(first + last) else f"{number(first)} → {number(last)}"
