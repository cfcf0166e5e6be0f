"""The signal in all weathers: it leaves no trace, takes wrapped networks and halves, and refuses the rest."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import theodolite as th
from theodolite import UseError
from theodolite.probes import Signal, signal

from .growable import Blocks, Branch, Parallel, batch_for, loss_for, network

LOSS = loss_for("pre")


def kept(model: nn.Module) -> list[Any]:
    """All that a look at a network could change."""
    modules = list(model.modules())
    hooks = [
        (len(one._forward_hooks), len(one._forward_pre_hooks), one.training, sorted(vars(one)))
        for one in modules
    ]
    tensors = [(id(one), one.requires_grad, one.grad, one._version) for one in model.parameters()]
    buffers = [(id(one), one.tolist()) for one in model.buffers()]
    values = [one.tolist() for one in model.parameters()]
    return [hooks, tensors, buffers, values, torch.get_rng_state().tolist()]


def close(one: Signal, other: Signal, rel: float) -> None:
    for mine, theirs in zip(one.points, other.points, strict=True):
        for name in ("gain", "error", "preconditioned", "norm", "gradient", "alignment"):
            assert getattr(mine, name) == pytest.approx(getattr(theirs, name), rel=rel), (mine.name, name)


@pytest.mark.parametrize("name", ["pre", "resnet", "experts", "GPT2"])
def test_a_look_leaves_no_trace(name: str) -> None:
    model, batch, loss = network(name).train(), batch_for(name, 4), loss_for(name)
    next(model.parameters()).grad = torch.ones_like(next(model.parameters()))
    next(iter(model.children())).eval()
    before = kept(model)
    signal(model, loss, batch)
    assert kept(model) == before
    bad = (
        batch[0],
        torch.where(torch.arange(4) < 3, 0, 99).view(-1, *[1] * (batch[1].ndim - 1)) + batch[1] * 0,
    )
    with pytest.raises((UseError, IndexError, RuntimeError)):
        signal(model, loss, batch, [batch, bad])
    assert kept(model) == before
    if name == "GPT2":
        assert model.config.use_cache


class Checkpointed(nn.Module):
    """A network whose blocks keep nothing for the backward pass."""

    def __init__(self, inner: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner.first(x)
        for block in self.inner.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        found: Tensor = self.inner.last(x)
        return found


def test_wrapped_compiled_and_checkpointed_networks_say_the_same() -> None:
    model, batch = network("parallel"), batch_for("parallel", 6)
    plain = signal(model, LOSS, batch)
    in_parts = copy.deepcopy(model)
    for at, block in enumerate(in_parts.blocks):
        in_parts.blocks[at] = torch.compile(block, backend="eager")
    for other in (
        nn.DataParallel(torch.compile(model, backend="eager")),
        in_parts,
        Checkpointed(model, reentrant=False),
        Checkpointed(model, reentrant=True),
    ):
        close(signal(other, LOSS, batch), plain, rel=1e-12)
    with torch.inference_mode():
        inputs = batch[0].clone()
    with torch.no_grad():
        close(signal(model, LOSS, (inputs, batch[1])), plain, rel=1e-12)


def test_units_may_run_in_the_second_dimension() -> None:
    batch = batch_for("flat", 8)
    torch.manual_seed(2)
    model = Blocks(Branch, nn.Embedding(16, 8)).double()
    plain = signal(model, LOSS, batch)
    model.turned = True
    turned = signal(model, LOSS, batch)
    close(turned, plain, rel=1e-10)
    assert turned.points[1].covariance.largest == pytest.approx(plain.points[1].covariance.largest)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_less_precise_networks_say_nearly_the_same(dtype: torch.dtype) -> None:
    model, batch = network("peri"), batch_for("peri", 16)
    exact = signal(model, LOSS, batch)
    found = signal(model.to(dtype), LOSS, batch)
    close(found, exact, rel=1e-3 if dtype == torch.float32 else 0.2)
    assert all(tensor.dtype == torch.float32 for tensor in found.points[0].directions.values())


def test_autocast_is_kept() -> None:
    model, batch = network("pre").float(), batch_for("pre", 16)
    exact = signal(model, LOSS, batch)
    with torch.autocast("cpu", torch.bfloat16):
        found = signal(model, LOSS, batch)
    close(found, exact, rel=0.2)
    assert found.points[0].gain != exact.points[0].gain


def test_corners_are_told() -> None:
    said = "of its entries, as after a ReLU"
    assert any(
        said in note for note in signal(network("resnet"), loss_for("resnet"), batch_for("resnet", 4)).notes
    )
    assert not any(said in note for note in signal(network("pre"), LOSS, batch_for("pre", 4)).notes)


def test_progress_reaches_the_end() -> None:
    told: list[float] = []
    batch = batch_for("pre", 4)
    found = signal(
        network("pre"),
        LOSS,
        [batch, batch],
        batch,
        points=[1, "blocks.2"],
        progress=lambda title, done: told.append(done),
    )
    assert told == pytest.approx([1 / 3, 2 / 3, 1])
    assert [one.name for one in found.points] == ["blocks.1", "blocks.2"]
    assert found.at("blocks.2") is found.points[1]


class Mixed(Blocks):
    """Units know of each other."""

    def forward(self, x: Tensor) -> Tensor:
        found = super().forward(x)
        return found + found.mean(0, keepdim=True)


def test_what_cannot_be_measured_is_refused() -> None:
    model, batch = network("pre"), batch_for("pre", 4)
    one = batch[0][:1], batch[1][:1]
    with pytest.raises(UseError, match="the number of held-out examples is 1: at least 2"):
        signal(model, LOSS, batch, one)
    with pytest.raises(UseError, match="the number of held-out examples is 1: at least 2"):
        signal(model, LOSS, take_first(batch))
    with pytest.raises(UseError, match="the number of held-out examples is 1: at least 2"):
        signal(model, LOSS, batch, DataLoader(list(zip(*one, strict=True))))
    with pytest.raises(UseError, match="the batches are empty"):
        signal(model, LOSS, [])
    plain = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    with pytest.raises(UseError, match="has no residual stream"):
        signal(plain, nn.functional.cross_entropy, (torch.zeros(4, 3), torch.zeros(4, dtype=torch.long)))
    with pytest.raises(UseError, match=re.escape("the loss of example 2 of batch 1 is inf")):
        signal(model, _infinite_for(batch[1][2]), [take_first(batch), batch], batch)
    mixed = Mixed(Parallel, nn.Embedding(16, 8)).double()
    with pytest.raises(UseError, match="depends on another example of its"):
        signal(mixed, LOSS, batch)
    with pytest.raises(UseError, match="no gradient flows from the loss back to the stream"):
        signal(model, lambda found, targets: LOSS(found.detach(), targets), batch)
    with pytest.raises(UseError, match="ridge is 0"):
        signal(model, LOSS, batch, ridge=0)
    with pytest.raises(UseError, match="is no point"):
        signal(model, LOSS, batch, points=["blocks.9"])
    with pytest.raises(UseError, match="It is one of gain, preconditioned"):
        signal(model, LOSS, batch).ranked("norm")  # type: ignore[arg-type]


class ByNumber(nn.Module):
    """Lists of two blocks each, which are called by number, so that none can be inserted."""

    def __init__(self, lists: int) -> None:
        super().__init__()
        for at in range(lists):
            blocks = (nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(2))
            self.add_module(f"list{at}", nn.ModuleList(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for one in self.children():
            x = x + one[0](x)  # type: ignore[index]
            x = x + one[1](x)  # type: ignore[index]
        return x


@pytest.mark.parametrize("lists, said", [(4, ""), (5, "and 1 more list"), (7, "and 3 more lists")])
def test_of_many_lists_without_a_place_a_few_are_named_each_once(lists: int, said: str) -> None:
    batch = torch.randn(64, 4), torch.randn(64, 4)
    with pytest.raises(UseError) as caught:
        signal(ByNumber(lists), nn.functional.mse_loss, batch)
    lines = str(caught.value).split(". ", 1)[1].split(";\n")
    assert [line.partition(":")[0] for line in lines[:4]] == [f"list{at}.0" for at in range(4)]
    assert lines[4:] == ([said] if said else [])


def take_first(batch: Any) -> Any:
    return batch[0][:2], batch[1][:2]


def _infinite_for(targets: Tensor) -> Any:
    """A loss that is infinite for the example with these targets."""

    def loss(found: Tensor, given: Tensor) -> Tensor:
        return LOSS(found, given) + torch.where((given[0] == targets).all(), torch.inf, 0.0)

    return loss


def test_experts_that_take_turns_keep_their_own_examples() -> None:
    """Held-out examples of a network with bare tensors are run one by one, and give what single runs give."""
    model, batch = network("experts"), batch_for("experts", 6)
    held_out = batch_for("experts", 4, seed=1)
    found = signal(model, LOSS, batch, held_out)
    single = [
        (held_out[0][example : example + 1], held_out[1][example : example + 1]) for example in range(4)
    ]
    close(signal(model, LOSS, batch, single), found, rel=1e-10)
    pooled = th.probes.signal(model, LOSS, held_out, batch)
    for one, other in zip(found.points, pooled.points, strict=True):
        # Both are the product of the mean gradients of both samples.
        assert one.gain == pytest.approx(other.gain, rel=1e-9)
