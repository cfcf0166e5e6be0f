"""Find tensors that are not finite."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from theodolite.core.calling import see_inside


def not_finite(tensors: Mapping[str, Tensor | None]) -> list[str]:
    """Names of the tensors with an entry that is nan or infinite; None is skipped.

    >>> import torch
    >>> not_finite({"a": torch.ones(2), "b": torch.tensor([0.0, torch.nan]), "c": None})
    ['b']
    """
    return [name for name, one in tensors.items() if one is not None and not bool(one.isfinite().all())]


def among(names: Sequence[str], total: int) -> str:
    """How many tensors these are, with the names of the first three.

    >>> among(["a"], 2), among(["a", "b", "c", "d"], 18)
    ('1 of 2 tensors (a)', '4 of 18 tensors (a, b, c, …)')
    """
    rest = ", …" if len(names) > 3 else ""
    return f"{len(names)} of {total} tensor{'s' * (total != 1)} ({', '.join(names[:3])}{rest})"


def spoilt(values: Any) -> bool:
    """Is there a tensor that is not finite? Minus infinity beside finite numbers is a mask.

    >>> import torch
    >>> spoilt({"x": torch.tensor([1.0, torch.nan])}), spoilt([torch.tensor([0.0, -torch.inf])])
    (True, False)
    """
    leaves = (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.is_floating_point())
    return any(
        not bool(((finite := leaf.isfinite()) | ((leaf == -math.inf) & finite.any())).all())
        for leaf in leaves
    )


def spoilt_part(batch: tuple[Any, Any]) -> str | None:
    """Which part of a batch is not finite; None if both are.

    >>> import torch
    >>> spoilt_part((torch.ones(2), torch.tensor([0.0, torch.inf])))
    'targets'
    """
    parts = zip(("inputs", "targets"), see_inside(batch), strict=True)
    return next((name for name, values in parts if spoilt(values)), None)
