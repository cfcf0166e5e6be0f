"""Spectral normalisation after its weight was drawn anew.

It divides a weight by an estimate of its largest singular value, from singular vectors that it keeps in
buffers. Those of an older weight make the estimate many times too small.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized
from torch.nn.utils.spectral_norm import SpectralNorm

from theodolite.anatomy.names import canonical_modules

ITERATIONS = 100
"""Of the power method: the largest singular value of a random matrix is then right to one or two percent."""


@torch.no_grad()
def fit_singular_vectors(model: nn.Module, generator: Callable[[str], torch.Generator]) -> None:
    """Fit the buffers of every spectral normalisation to the weights there are.

    `generator` gives random numbers by the name of the module, where the power method starts.
    """
    for name, module in canonical_modules(model):
        for matrix, u, v in _normalised(module):
            matrix = matrix.float()
            left = torch.randn(u.shape, generator=generator(name)).to(matrix)
            for _ in range(ITERATIONS):
                right = F.normalize(matrix.T @ left, dim=0)
                left = F.normalize(matrix @ right, dim=0)
            u.copy_(left)
            v.copy_(right)


def _normalised(module: nn.Module) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """The weights that a module normalises, as matrices, each with its buffers u and v."""
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, SpectralNorm):
            weight, u, v = (getattr(module, hook.name + end) for end in ("_orig", "_u", "_v"))
            yield hook.reshape_weight_to_matrix(_whole(weight)), u, v
    if is_parametrized(module):
        assert isinstance(module.parametrizations, nn.ModuleDict)
        for steps in module.parametrizations.values():
            assert isinstance(steps, ParametrizationList)
            yield from _along(steps)


def _along(steps: ParametrizationList) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """The same of one parametrized weight: each step reads what the one before it made."""
    if not any(isinstance(step, _SpectralNorm) for step in steps):
        return
    names = ["original"] if steps.is_tensor else [f"original{index}" for index in range(steps.ntensors)]
    values = [_whole(getattr(steps, name)) for name in names]
    for step in steps:
        if isinstance(step, _SpectralNorm) and values[0].ndim > 1:
            yield step._reshape_weight_to_matrix(values[0]), step._u, step._v
        training = step.training
        values = [step.eval()(*values)]
        step.train(training)


def _whole(tensor: Tensor) -> Tensor:
    """All of a tensor that is sharded over processes."""
    whole = getattr(tensor, "full_tensor", None)
    return tensor if whole is None else whole()
