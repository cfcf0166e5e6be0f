"""Forward passes of plain operations: no higher-order operators such as FlexAttention, no checkpoints."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch._higher_order_ops.flex_attention import math_attention
from torch._ops import HigherOrderOperator
from torch.utils import checkpoint
from torch.utils._pytree import tree_leaves

FLEX = "torch.nn.attention.flex_attention"


@contextlib.contextmanager
def plain_operators() -> Iterator[None]:
    """Run higher-order operators as plain operations, which can be recorded and differentiated twice.

    FlexAttention is computed by its definition, `torch.cond` runs the branch that is taken, loops and scans
    run step by step. Compilation is off, as these operators compile themselves.
    """
    dispatch = HigherOrderOperator.__call__

    def run(operator: HigherOrderOperator, /, *args: Any, **kwargs: Any) -> Any:
        definition = _DEFINITIONS.get(operator.name()) or operator.py_kernels.get(
            DispatchKey.CompositeExplicitAutograd
        )
        return definition(*args, **kwargs) if definition else dispatch(operator, *args, **kwargs)

    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(HigherOrderOperator, "__call__", run))
        for name, value in _SETTINGS.items():
            if hasattr(flex := sys.modules.get(FLEX), name):
                stack.enter_context(patch.object(flex, name, value))
        if sys.modules.keys() & {FLEX, "torch._dynamo"}:  # setting it without them takes a second
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


def trainable_operators(inputs: Any) -> contextlib.AbstractContextManager[None]:
    """`plain_operators` on the CPU and on MPS, where torch's FlexAttention has no backward pass."""
    if FLEX not in sys.modules or torch.compiler.is_compiling():
        return contextlib.nullcontext()
    devices = {leaf.device.type for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)}
    return plain_operators() if devices & {"cpu", "mps"} else contextlib.nullcontext()


def _cond(predicate: Any, taken: Callable[..., Any], other: Callable[..., Any], operands: Any = ()) -> Any:
    return (taken if predicate else other)(*operands)


def _invoke_subgraph(subgraph: Callable[..., Any], identifier: Any, *operands: Any) -> Any:
    return subgraph(*operands)


def _scan(combine: Callable[..., Any], init: Any, xs: Any, additional_inputs: Any) -> Any:
    from torch._higher_order_ops.scan import generic_scan

    return generic_scan(combine, init, xs, additional_inputs=additional_inputs)


_SETTINGS = {
    "_validate_device": lambda *_: None,  # refuses gradients on the CPU
    "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG": True,  # no warning that it is not compiled
}
"""Settings of the module of FlexAttention, if its version has them."""

_DEFINITIONS: dict[str, Callable[..., Any]] = {
    "flex_attention": math_attention,
    "cond": _cond,
    "invoke_subgraph": _invoke_subgraph,
    "scan": _scan,
}
"""Definitions of operators whose own kernel cannot be recorded, or copies its result."""


_CHECKPOINT_GENERATOR = "_checkpoint_without_reentrant_generator"


@contextlib.contextmanager
def without_checkpoints() -> Iterator[None]:
    """Switch activation checkpointing off.

    Its second forward pass would be an ordinary one, with the model's own parameters and without tangents.
    """

    def plain(*args: Any, **kwargs: Any) -> Iterator[None]:
        yield

    class Plain:
        @staticmethod
        def apply(function: Any, preserve: bool, *args: Any) -> Any:
            return function(*args)

    # Torch 2.15 has a second generator, whose name begins with that of the first, and calls only that one.
    # Composable checkpoints hold a name of their own for it.
    modules = (checkpoint, sys.modules.get("torch.distributed._composable.checkpoint_activation"))
    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(checkpoint, "CheckpointFunction", Plain))
        for module in filter(None, modules):
            for name in [one for one in vars(module) if one.startswith(_CHECKPOINT_GENERATOR)]:
                stack.enter_context(patch.object(module, name, plain))
        yield
