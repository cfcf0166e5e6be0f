"""Class geometry by its definitions: D×D matrices, and loops over samples and pairs."""

from __future__ import annotations

import math
from itertools import permutations

import numpy as np
import pytest
from numpy.typing import NDArray
from torch import Tensor

from theodolite.probes.features.class_spread import ClassGeometry

Array = NDArray[np.float64]


def explicit(features: Tensor, labels: Tensor) -> ClassGeometry:
    """All of it, of features (n, D) and labels (n,)."""
    rows: Array = features.double().numpy()
    classes = labels.numpy()
    num = classes.max() + 1
    means = np.stack([rows[classes == one].mean(0) for one in range(num)])
    centred = means - means.mean(0)
    away = rows - means[classes]
    within = away.T @ away / len(rows)
    between = centred.T @ centred / num
    variances = [(away[classes == one] ** 2).sum(1).mean() for one in range(num)]
    gram = centred @ centred.T
    simplex = (np.eye(num) - 1 / num) / math.sqrt(num - 1)
    lengths = np.linalg.norm(centred, axis=1)
    pairs = list(permutations(range(num), 2))
    nearest = np.array([np.linalg.norm(row - means, axis=1).argmin() for row in rows])
    return ClassGeometry(
        quotient=np.trace(within) / np.trace(between),
        pinv=np.trace(within @ np.linalg.pinv(between, rcond=1e-8)) / num,
        cdnv=float(
            np.mean(
                [(variances[i] + variances[j]) / (2 * ((means[i] - means[j]) ** 2).sum()) for i, j in pairs]
            )
        ),
        nc2=float(np.linalg.norm(gram / np.linalg.norm(gram) - simplex)),
        equinorm=float(lengths.std() / lengths.mean()),
        equiangle=float(
            np.mean([abs(gram[i, j] / lengths[i] / lengths[j] + 1 / (num - 1)) for i, j in pairs])
        ),
        nearest=float((nearest == classes).mean()),
    )


def same(found: ClassGeometry, wanted: ClassGeometry, rel: float = 1e-9) -> None:
    for name, value in vars(wanted).items():
        assert getattr(found, name) == pytest.approx(value, rel=rel, abs=1e-12), name
