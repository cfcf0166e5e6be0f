"""Drawing a network's initial weights by a plan: the same numbers for the same seed, wherever they go."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from theodolite.core.building import build_model
from theodolite.core.errors import UseError
from theodolite.core.exclusive import exclusive
from theodolite.planning.fitting import matched
from theodolite.planning.laws import spread_of, widened
from theodolite.planning.normalising import fit_singular_vectors
from theodolite.planning.plan import Plan, Row


@exclusive()
def build(plan: Plan, seed: int, *, device: str = "cpu") -> nn.Module:
    """The network at the plan's size, initialised by the plan, with its multipliers attached.

    >>> import theodolite as th, torch
    >>> tokens = torch.zeros(1, 8, dtype=torch.long)
    >>> plan = th.plan(th.models.GPT, tokens, size=th.Size(256, 2), base=th.Size(64, 2), lr=2**-8)
    >>> model = build(plan, 0)
    >>> round(model.readout.weight.std().item() * 64**0.5, 2)     # 1/√64 at base size, over the ratio 4
    0.25
    """
    if torch.device(device).type == "meta":
        raise UseError("device is meta, where tensors have no values: build on cpu or cuda")
    _check_seed(seed)
    model = _built(plan, seed)
    _fill(plan, matched(plan, model), seed, own=matched(plan, model))
    _fit_singular_vectors(model, seed)
    plan.attach(model)
    return model.to(device)


@exclusive()
def initialize(plan: Plan, model: nn.Module, seed: int = 0) -> nn.Module:
    """Draw the network's weights by the plan, in place, and attach its multipliers.

    Every tensor has a generator of its own, seeded by the seed and the tensor's name, and is drawn in float32
    on the CPU: neither device, dtype, wrapper, sharding nor the order of construction changes the numbers.
    Buffers are left as they are, and so are tensors that are frozen or that nothing reads. Only the singular
    vectors that a spectral normalisation keeps of its weight are found anew.
    """
    _check_seed(seed)
    tensors = matched(plan, model)
    hollow = [name for name, tensor in tensors.items() if tensor.is_meta]
    if hollow:
        raise UseError(
            f"{hollow[0]} is on the meta device and has no memory to draw into ({len(hollow)} such tensors): "
            'call model.to_empty(device="cuda") first, and fill its buffers and frozen parameters'
        )
    own: Mapping[str, Tensor] = {}
    if any(row.init.kind == "own" for row in plan.rows.values()):
        own = matched(plan, _built(plan, seed))
    _fill(plan, tensors, seed, own)
    _fit_singular_vectors(model, seed)
    plan.attach(model)
    return model


def _check_seed(seed: int) -> None:
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise UseError(f"seed is {seed!r}: a seed is a whole number from 0 to 2⁶³ − 1")


def _built(plan: Plan, seed: int) -> nn.Module:
    """The network as it initialises itself, on the CPU."""
    if plan.build_function is None:
        names = [name for name, row in plan.rows.items() if row.init.kind == "own"]
        why = f", which {names[0]} starts from" if names else ""
        raise UseError(f"the plan has no build function{why}: read it with Plan.load(path, build)")
    return build_model(plan.build_function, plan.size, seed=seed)


@torch.no_grad()
def _fill(plan: Plan, tensors: Mapping[str, Tensor], seed: int, own: Mapping[str, Tensor]) -> None:
    seeds = _seeds(plan.rows, seed)
    for name, tensor in tensors.items():
        row = plan.rows[name]
        if row.init.kind == "kept" or not tensor.requires_grad:
            continue
        if row.init.kind == "own":
            values = _rescaled(row, own[name].detach())
        else:
            draw = row.init.draw_complex if tensor.is_complex() else row.init.draw
            values = draw(row.shape, torch.Generator().manual_seed(seeds[name]))
        _put(tensor, values)


def _fit_singular_vectors(model: nn.Module, seed: int) -> None:
    fit_singular_vectors(model, lambda name: torch.Generator().manual_seed(_hashed(f"{seed}/0/{name}")))


def _rescaled(row: Row, values: Tensor) -> Tensor:
    """The network's own values: a weight's with the planned mean and std, others times what was absorbed.

    A gain whose own values go with the width, as those of weight normalisation do, gets its planned size.
    """
    if row.role in ("bias", "gain"):
        scaled = values * row.init.factor
        size = widened(scaled).abs().square().mean().sqrt().item()
        goes_with_width = row.role == "gain" and size > 0 and abs(row.init.size / size - 1) > 0.1
        return scaled * (row.init.size / size) if goes_with_width else scaled
    wide, planned = widened(values), row.init.mean
    std, mean = spread_of(wide), wide.mean()
    if not std:
        return values * row.init.factor
    factor = row.init.std / std
    if not planned or not mean:
        return values * factor
    if (values == 0).any():  # a shift would fill what the network leaves at zero
        return values * min(factor, abs(planned) / mean.abs().item())
    return (wide - mean) * factor + planned * (mean / mean.abs() if mean.is_complex() else 1)


def _put(tensor: Tensor, values: Tensor) -> None:
    """Write them into the tensor; of a sharded one, into this rank's part."""
    if hasattr(tensor, "device_mesh"):  # before the import, which takes a while
        from torch.distributed.tensor import DTensor, distribute_tensor

        assert isinstance(tensor, DTensor)
        # Every rank has drawn the whole and keeps its part: nothing is sent.
        values = values.to(tensor.dtype)
        whole = distribute_tensor(values, tensor.device_mesh, tensor.placements, src_data_rank=None)
        tensor, values = tensor.to_local(), whole.to_local()
    tensor.copy_(values)


def _seeds(names: Iterable[str], seed: int) -> dict[str, int]:
    """A seed for each tensor, no two alike: torch's CPU generator heeds only 32 bits.

    A weight that has been parametrized, as surgery does, starts as it would without.

    >>> _seeds(["a", "b"], 0)
    {'a': 2848605546, 'b': 3439470678}
    >>> _seeds(["parametrizations.b.original"], 0)
    {'parametrizations.b.original': 3439470678}
    """
    found: dict[str, int] = {}
    taken: set[int] = set()
    for name in sorted(names):
        attempt = 0
        plain = PARAMETRIZED.sub(r"\1", name)
        while (number := _hashed(f"{seed}/{attempt}/{plain}")) in taken:
            attempt += 1
        taken.add(number)
        found[name] = number
    return found


PARAMETRIZED = re.compile(r"\bparametrizations\.([^.]+)\.original$")


def _hashed(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")
