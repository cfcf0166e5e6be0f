"""Anatomies that many tests need, each found once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

import theodolite as th

_KNOWN: dict[Hashable, th.Anatomy] = {}


def _itself(build: Any) -> Hashable:
    """A partial is known by the function and the options."""
    return (build.func, build.args, frozenset(build.keywords.items())) if type(build) is partial else build


@contextmanager
def shared_anatomies(*modules: str, known_by: Callable[[Any], Hashable] = _itself) -> Iterator[None]:
    """Let these modules of theodolite dissect a network at a size once for all tests.

    Tracing it, at twice the width and depth too, would be half of the time of many of them.
    """

    def dissect(build: Any, inputs: Any, *, size: th.Size, roles: Any = None) -> th.Anatomy:
        seen = tuple(
            (leaf.shape, leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf
            for leaf in tree_leaves(inputs)
        )
        key = known_by(build), size, seen, frozenset((roles or {}).items())
        if key not in _KNOWN:
            _KNOWN[key] = th.dissect(build, inputs, size=size, roles=roles)
        return _KNOWN[key]

    with pytest.MonkeyPatch.context() as patch:
        for module in modules:
            patch.setattr(f"theodolite.{module}.dissect", dissect)
        yield
