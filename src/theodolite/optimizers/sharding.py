"""Matrices that several processes hold: one owner works on each.

Replicas (DistributedDataParallel) hold all matrices: each works on its share, and one `all_gather` gives all
results to all. Shards (`fully_shard`, a `DTensor` cut along one dimension) are sent to the owner of their
matrix by one `all_to_all`, and another one sends the shards of the results back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from theodolite.core.errors import UseError

Work = Callable[[list[int], list[Tensor]], list[Tensor]]
"""From indices among all tensors, and these tensors whole, to results of the same shapes."""


@dataclass(frozen=True, eq=False)
class Replicas:
    """The processes that hold copies of a model. A copied optimizer shares them."""

    group: Any

    @staticmethod
    def of(given: Any) -> Replicas | None:
        """From a DistributedDataParallel model, a process group or None; None for a single process."""
        if given is None or isinstance(given, Replicas):
            return given
        group = getattr(given, "process_group", given)
        if not isinstance(group, torch.distributed.ProcessGroup):
            raise UseError(
                f"shared_over is a {type(given).__name__}: give the DistributedDataParallel model, or its "
                "process group"
            )
        return Replicas(group) if group.size() > 1 else None

    def __deepcopy__(self, memo: Any) -> Replicas:
        return self

    def results(self, tensors: Sequence[Tensor], costs: Sequence[float], work: Work) -> list[Tensor]:
        """The results of all tensors, each computed in one process."""
        rank, size = self.group.rank(), self.group.size()
        owned = shared_out(costs, size)
        done = work(owned[rank], [tensors[place] for place in owned[rank]])
        counts = [sum(tensors[place].numel() for place in some) for some in owned]
        packed = tensors[0].new_zeros(max(counts))  # all_gather needs the same size everywhere
        if done:
            packed[: counts[rank]] = torch.cat([one.reshape(-1) for one in done])
        every = packed.new_empty(size * len(packed))
        torch.distributed.all_gather_into_tensor(every, packed, group=self.group)
        parts = [part[:count] for part, count in zip(every.chunk(size), counts, strict=True)]
        return _unpacked(parts, owned, tensors)


@dataclass(frozen=True)
class Sharding:
    """A tensor cut along its dimension `dim`, over the dimension `over` of a mesh of processes."""

    mesh: Any
    over: int
    dim: int

    @staticmethod
    def of(param: Any) -> Sharding | None:
        """None if every process holds the whole tensor, or if it is cut in another way."""
        if not is_sharded(param):
            return None
        from torch.distributed.tensor import Shard

        cuts = [(over, place) for over, place in enumerate(param.placements) if not place.is_replicate()]
        if len(cuts) != 1 or type(cuts[0][1]) is not Shard:
            return None
        return Sharding(param.device_mesh, cuts[0][0], cuts[0][1].dim)

    def shape(self, whole: Sequence[int], rank: int) -> tuple[int, ...]:
        """The shape of the piece of one process, as `torch.chunk` cuts: the last may be smaller, or empty."""
        each = -(-whole[self.dim] // self.mesh.size(self.over))
        left = max(0, whole[self.dim] - rank * each)
        return (*whole[: self.dim], min(each, left), *whole[self.dim + 1 :])


def sharded_results(
    cuts: Sequence[Sharding],
    shapes: Sequence[Sequence[int]],
    pieces: Sequence[Tensor],
    costs: Sequence[float],
    work: Work,
) -> list[Tensor]:
    """This process's pieces of the results of all tensors, of which each process holds pieces.

    All are cut over the same dimension of the same mesh.
    """
    mesh, over = cuts[0].mesh, cuts[0].over
    group, rank, size = mesh.get_group(over), mesh.get_local_rank(over), mesh.size(over)
    owned = shared_out(costs, size)
    mine = owned[rank]
    held = [[cuts[place].shape(shapes[place], one) for place in mine] for one in range(size)]
    counts = [[math.prod(shape) for shape in some] for some in held]

    sent = [pieces[place].reshape(-1) for some in owned for place in some]
    leaving = [sum(pieces[place].numel() for place in some) for some in owned]
    arriving = [sum(some) for some in counts]
    parts = _exchanged(sent, leaving, arriving, pieces[0], group).split(arriving)
    by_rank = [part.split(some) for part, some in zip(parts, counts, strict=True)]
    wholes = [
        torch.cat([by_rank[one][i].view(held[one][i]) for one in range(size)], dim=cuts[place].dim)
        for i, place in enumerate(mine)
    ]
    done = work(mine, wholes)

    cut = [
        one.split([held[rank][i][cuts[place].dim] for rank in range(size)], dim=cuts[place].dim)
        for i, (place, one) in enumerate(zip(mine, done, strict=True))
    ]
    back = [cut[i][one].reshape(-1) for one in range(size) for i in range(len(mine))]
    returned = _exchanged(back, arriving, leaving, pieces[0], group).split(leaving)
    return _unpacked(returned, owned, pieces)


def replicas_of(model: Any) -> Replicas | None:
    """The replicas of a DistributedDataParallel model, compiled or not; None for other models."""
    model = getattr(model, "_orig_mod", model)
    return Replicas.of(model) if isinstance(model, DistributedDataParallel) else None


def shared_out(costs: Sequence[float], size: int) -> list[list[int]]:
    """The items of each process: the most expensive first, to the one with the least work so far.

    >>> shared_out([1.0, 5.0, 2.0, 2.0], 2)
    [[1], [0, 2, 3]]
    """
    loads = [0.0] * size
    owned: list[list[int]] = [[] for _ in range(size)]
    for place in sorted(range(len(costs)), key=lambda place: (-costs[place], place)):
        owner = loads.index(min(loads))
        loads[owner] += costs[place]
        owned[owner].append(place)
    return [sorted(places) for places in owned]


def is_sharded(tensor: Tensor) -> bool:
    """Is it a DTensor, of which this process may hold a part?"""
    return hasattr(tensor, "full_tensor")


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this process holds; it shares the tensor's memory."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def gathered(piece: Tensor, like: Any) -> Tensor:
    """The whole tensor, from this process's piece, cut as `like` is."""
    if not is_sharded(like):
        return piece
    from torch.distributed.tensor import DTensor

    mesh, placements = like.device_mesh, like.placements
    whole = DTensor.from_local(
        piece, mesh, placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    return whole.full_tensor()


def scattered(whole: Tensor, like: Any) -> Tensor:
    """This process's piece of a tensor that all processes hold, cut as `like` is."""
    if not is_sharded(like):
        return whole
    from torch.distributed.tensor import DTensor, Replicate

    replicated = [Replicate()] * like.device_mesh.ndim
    held = DTensor.from_local(whole.contiguous(), like.device_mesh, replicated, run_check=False)
    return held.redistribute(placements=like.placements).to_local()


def mesh_groups(tensors: Iterable[Any]) -> list[Any]:
    """The process groups over which any tensor is cut, each once, in the same order in all processes."""
    found: dict[tuple[int, int], Any] = {}
    for tensor in tensors:
        if is_sharded(tensor):
            for over in range(tensor.device_mesh.ndim):
                found.setdefault((id(tensor.device_mesh), over), tensor.device_mesh.get_group(over))
    return list(found.values())


def _unpacked(
    parts: Sequence[Tensor], owned: Sequence[Sequence[int]], like: Sequence[Tensor]
) -> list[Tensor]:
    """Tensors of the shapes of `like`, from the vector of each owner."""
    found = list(like)
    for part, places in zip(parts, owned, strict=True):
        pieces = part.split([like[place].numel() for place in places])
        for place, piece in zip(places, pieces, strict=True):
            found[place] = piece.view(like[place].shape)
    return found


def _exchanged(
    parts: list[Tensor], leaving: list[int], arriving: list[int], like: Tensor, group: Any
) -> Tensor:
    sent = torch.cat(parts) if parts else like.new_empty(0)
    received = sent.new_empty(sum(arriving))
    torch.distributed.all_to_all_single(received, sent, arriving, leaving, group=group)
    return received
