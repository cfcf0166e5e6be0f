"""What one more block would do at first, at every point of a trained network."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from theodolite.core.batches import Batch
from theodolite.probes.signal.signal import signal
from theodolite_studies.depth_expansion.images import Images
from theodolite_studies.depth_expansion.reading import brief

BATCH = 256


def candidates(model: nn.Module, train: Images, test: Images, num: int) -> dict[str, Any]:
    """By point: ‖M̄‖², and the gains along −M̄ and −M̄S⁻¹ with their standard errors.

    The directions are estimated on `num` images that were trained on, and judged by as many that were not.
    """
    found = signal(model, F.cross_entropy, _some(train, num), _some(test, num))
    names = ("gain", "error", "preconditioned", "preconditioned_error")
    return {
        "points": [one.name for one in found.points],
        "squared": [brief(one.norm**2) for one in found.points],
        **{name: [brief(getattr(one, name)) for one in found.points] for name in names},
        "above": len(found.above),
    }


def _some(images: Images, num: int) -> list[Batch]:
    rows = torch.arange(min(num, len(images)), device=images.labels.device)
    return [(images.plain(some), images.labels[some]) for some in rows.split(BATCH)]
