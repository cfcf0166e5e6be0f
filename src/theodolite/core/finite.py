"""Find tensors that are not finite."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor


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
