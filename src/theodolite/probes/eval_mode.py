"""Run a network in eval mode without gradients, and restore everything."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.backends import cuda
from torch.nn.attention import SDPBackend, sdpa_kernel

from theodolite.anatomy.recording.undisturbed import undisturbed
from theodolite.core.building import untouched_randomness
from theodolite.surgery.blocks import uncached

_KERNELS = (
    (SDPBackend.FLASH_ATTENTION, cuda.flash_sdp_enabled),
    (SDPBackend.EFFICIENT_ATTENTION, cuda.mem_efficient_sdp_enabled),
    (SDPBackend.CUDNN_ATTENTION, cuda.cudnn_sdp_enabled),
    (SDPBackend.MATH, cuda.math_sdp_enabled),
)


@contextmanager
def at_rest(model: nn.Module) -> Iterator[None]:
    """Eval mode, no compilation, no gradients unless they are enabled inside; all is restored at the end.

    As `undisturbed`, but with the fast kernels that a first derivative may use, without a cache of keys and
    values, and without changes of the random number generators.

    >>> model = nn.Sequential(nn.Dropout(), nn.BatchNorm1d(2)).train()
    >>> with at_rest(model):
    ...     print(model(torch.ones(3, 2)).requires_grad, model.training)
    False False
    >>> model.training, model[1].num_batches_tracked
    (True, tensor(0))
    """
    kernels = [kernel for kernel, enabled in _KERNELS if enabled()]
    onednn = torch._C._get_mkldnn_enabled()
    with untouched_randomness(), undisturbed(model), uncached(model):
        torch._C._set_mkldnn_enabled(onednn)
        with sdpa_kernel(kernels):
            yield
