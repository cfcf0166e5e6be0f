"""Draw a network's initial weights: the same numbers for the same seed, on every device, sharded or not."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized
from torch.nn.utils.spectral_norm import SpectralNorm

from theodolite.anatomy.names import canonical_modules
from theodolite.planning.init_reading import std_of, widened
from theodolite.planning.rows import PlanRow


@torch.no_grad()
def draw_weights(
    rows: Mapping[str, PlanRow], tensors: Mapping[str, Tensor], seed: int, own: Mapping[str, Tensor]
) -> None:
    """Draw the tensors by their rows, in place; `own` holds the values that the network draws by itself.

    Every tensor has its own generator, seeded by the seed and the tensor's name, and is drawn in float32 on
    the CPU: device, dtype, wrappers, sharding and the order of construction do not change the numbers.
    """
    seeds = _seeds(rows, seed)
    for name, tensor in tensors.items():
        row = rows[name]
        if row.init.kind == "kept" or not tensor.requires_grad:
            continue
        if row.init.kind == "own":
            values = _rescaled(row, own[name].detach())
        else:
            draw = row.init.draw_complex if tensor.is_complex() else row.init.draw
            values = draw(row.shape, torch.Generator().manual_seed(seeds[name]))
        put_values(tensor, values)


def _rescaled(row: PlanRow, values: Tensor) -> Tensor:
    """The network's own values: a weight's with the planned mean and std, others times what was absorbed.

    A gain whose own values depend on the width, as with weight normalisation, gets its planned size.
    """
    if row.role in ("bias", "gain"):
        scaled = values * row.init.factor
        size = widened(scaled).abs().square().mean().sqrt().item()
        follows_width = row.role == "gain" and size > 0 and abs(row.init.size / size - 1) > 0.1
        return scaled * (row.init.size / size) if follows_width else scaled
    wide, planned = widened(values), row.init.mean
    std, mean = std_of(wide), wide.mean()
    if not std:
        return values * row.init.factor
    factor = row.init.std / std
    if not planned or not mean:
        return values * factor
    if (values == 0).any():  # a shift would fill what the network leaves at zero
        return values * min(factor, abs(planned) / mean.abs().item())
    return (wide - mean) * factor + planned * (mean / mean.abs() if mean.is_complex() else 1)


def put_values(tensor: Tensor, values: Tensor) -> None:
    """Write the values into the tensor; into this rank's part of a sharded one."""
    if hasattr(tensor, "device_mesh"):  # before the import, which takes a while
        from torch.distributed.tensor import DTensor, distribute_tensor

        assert isinstance(tensor, DTensor)
        # Every rank has drawn the whole and keeps its part: nothing is sent.
        values = values.to(tensor.dtype)
        whole = distribute_tensor(values, tensor.device_mesh, tensor.placements, src_data_rank=None)
        tensor, values = tensor.to_local(), whole.to_local()
    tensor.copy_(values)


def _seeds(names: Iterable[str], seed: int) -> dict[str, int]:
    """A different seed for each tensor; torch's CPU generator uses only 32 bits.

    A weight that surgery has parametrized starts as it would without.

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


POWER_ITERATIONS = 100
"""The largest singular value of a random matrix is then right to one or two percent."""


@torch.no_grad()
def fit_singular_vectors(model: nn.Module, seed: int) -> None:
    """Fit the buffers of every spectral normalisation to the current weights.

    It divides a weight by an estimate of its largest singular value, from singular vectors in buffers. Those
    of an older weight would make the estimate many times too small.
    """
    for name, module in canonical_modules(model):
        for matrix, u, v in _spectrally_normalised(module):
            matrix = matrix.float()
            generator = torch.Generator().manual_seed(_hashed(f"{seed}/0/{name}"))
            left = torch.randn(u.shape, generator=generator).to(matrix)
            for _ in range(POWER_ITERATIONS):
                right = F.normalize(matrix.T @ left, dim=0)
                left = F.normalize(matrix @ right, dim=0)
            u.copy_(left)
            v.copy_(right)


def _spectrally_normalised(module: nn.Module) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """The weights that a module normalises, as matrices, each with its buffers u and v."""
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, SpectralNorm):
            weight, u, v = (getattr(module, hook.name + end) for end in ("_orig", "_u", "_v"))
            yield hook.reshape_weight_to_matrix(_whole(weight)), u, v
    if not is_parametrized(module):
        return
    assert isinstance(module.parametrizations, nn.ModuleDict)
    for steps in module.parametrizations.values():
        assert isinstance(steps, ParametrizationList)
        if not any(isinstance(step, _SpectralNorm) for step in steps):
            continue
        names = ["original"] if steps.is_tensor else [f"original{index}" for index in range(steps.ntensors)]
        values = [_whole(getattr(steps, name)) for name in names]
        for step in steps:  # each reads what the one before it made
            if isinstance(step, _SpectralNorm) and values[0].ndim > 1:
                yield step._reshape_weight_to_matrix(values[0]), step._u, step._v
            training = step.training
            values = [step.eval()(*values)]
            step.train(training)


def _whole(tensor: Tensor) -> Tensor:
    """All of a tensor that may be sharded over processes."""
    whole = getattr(tensor, "full_tensor", None)
    return tensor if whole is None else whole()
