"""What a network is wrapped in does not change its anatomy."""

from __future__ import annotations

import dataclasses
import io
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

from theodolite.anatomy import Anatomy, dissect
from theodolite.core.size import Size
from theodolite.models import GPT

TOKENS = torch.zeros(2, 8, dtype=torch.long)


def _gpt(width: int = 32, depth: int = 2) -> GPT:
    return GPT(width, depth, vocab=61, context=16, head_dim=8, norm_placement="peri", qk_norm=True, tied=True)


def _facts(anatomy: Anatomy) -> dict[str, Any]:
    return {
        "parts": {name: dataclasses.asdict(part) for name, part in anatomy.items()},
        "order": list(anatomy),
        "branches": [dataclasses.asdict(branch) for branch in anatomy.branches],
        "blocks": anatomy.grown_blocks,
    }


@contextmanager
def _process_group(folder: Path) -> Iterator[None]:
    store = dist.FileStore(str(folder / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _compile(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")  # type: ignore[return-value]


def _compiled_blocks(model: GPT) -> nn.Module:
    for number, block in enumerate(model.blocks):
        model.blocks[number] = _compile(block)
    return model


def _compiled_in_place(model: GPT) -> nn.Module:
    model.compile(backend="eager")
    model.blocks[0].attention.compile(backend="eager")
    return model


def _checkpoint_wrapped(impl: CheckpointImpl) -> Callable[[GPT], nn.Module]:
    def wrap(model: GPT) -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch 2.9 advises against the reentrant one
            for number, block in enumerate(model.blocks):
                model.blocks[number] = checkpoint_wrapper(block, checkpoint_impl=impl)
        return model

    return wrap


def _checkpointed(reentrant: bool) -> Callable[[GPT], nn.Module]:
    def wrap(model: GPT) -> nn.Module:
        for block in model.blocks:
            forward = block.forward
            block.forward = lambda *args, f=forward: checkpoint(f, *args, use_reentrant=reentrant)
        return model

    return wrap


WRAPPERS: dict[str, Callable[[GPT], nn.Module]] = {
    "DataParallel": nn.DataParallel,
    "torch.compile": _compile,
    "torch.compile of DataParallel": lambda model: _compile(nn.DataParallel(model)),
    "compiled blocks": _compiled_blocks,
    "module.compile()": _compiled_in_place,
    "checkpoint_wrapper": _checkpoint_wrapped(CheckpointImpl.NO_REENTRANT),
    "checkpoint_wrapper, reentrant": _checkpoint_wrapped(CheckpointImpl.REENTRANT),
    "torch.utils.checkpoint": _checkpointed(reentrant=False),
    "torch.utils.checkpoint, reentrant": _checkpointed(reentrant=True),
    "compiled checkpoint_wrapper": lambda m: _compile(_checkpoint_wrapped(CheckpointImpl.NO_REENTRANT)(m)),
}
each_wrapper = pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)


@cache
def _bare(size: Size | None = None) -> dict[str, Any]:
    return _facts(dissect(_gpt, TOKENS, size=size) if size else dissect(_gpt(), TOKENS))


@each_wrapper
def test_a_wrapped_module_has_the_anatomy_of_the_bare_one(wrap: Callable[[GPT], nn.Module]) -> None:
    assert _facts(dissect(wrap(_gpt()), TOKENS)) == _bare()


@each_wrapper
def test_a_build_that_wraps_has_the_anatomy_of_the_bare_one(wrap: Callable[[GPT], nn.Module]) -> None:
    def build(width: int, depth: int) -> nn.Module:
        return wrap(_gpt(width, depth))

    wrapped = dissect(build, TOKENS, size=Size(32, 2))
    assert _facts(wrapped) == _bare(Size(32, 2))


def test_ddp_has_the_anatomy_of_the_bare_module(tmp_path: Path) -> None:
    from torch.nn.parallel import DistributedDataParallel

    bare = _bare()
    with _process_group(tmp_path):

        class Own(DistributedDataParallel):
            """A user's own."""

        assert _facts(dissect(Own(_gpt()), TOKENS)) == bare
        wrapped = DistributedDataParallel(_gpt())
        assert _facts(dissect(wrapped, TOKENS)) == bare
        assert _facts(dissect(_compile(wrapped), TOKENS)) == bare


def test_gradient_checkpointing_of_transformers_changes_nothing() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=64,
    )
    with redirect_stderr(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # newer versions have another name for it
        model = transformers.LlamaForCausalLM(config)
        bare = _facts(dissect(model, TOKENS))
        for reentrant in (False, True):
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.train()
            assert _facts(dissect(model, TOKENS)) == bare
            assert model.training
            assert model.is_gradient_checkpointing


class Plain(nn.Module):
    """A user's own attributes that happen to have a wrapper's names."""

    def __init__(self, width: int = 16, depth: int = 1) -> None:
        super().__init__()
        self.module = nn.Linear(4, width)
        self._orig_mod = nn.Linear(width, width)
        self._checkpoint_wrapped_module = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self._checkpoint_wrapped_module(self._orig_mod(self.module(x)).relu())


class DataParallel(nn.Module):
    """A user's class that is called like torch's."""

    def __init__(self, width: int = 16, depth: int = 1) -> None:
        super().__init__()
        self.module = nn.Linear(4, width)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x) * self.scale


@pytest.mark.parametrize(
    "wrap", [lambda m: m, nn.DataParallel, _compile], ids=["bare", "parallel", "compiled"]
)
def test_names_that_only_look_like_a_wrapper_stay(wrap: Callable[[nn.Module], nn.Module]) -> None:
    inputs = torch.zeros(2, 4)
    for user in (Plain, DataParallel):
        expected = [name for name, _ in user().named_parameters()]
        assert sorted(dissect(wrap(user()), inputs)) == sorted(expected)
        assert sorted(dissect(user, inputs, size=Size(16, 1))) == sorted(expected)
