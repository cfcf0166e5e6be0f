"""One training step of many models as one program.

The forward pass is the network's own, under `torch.vmap` over the models' tensors; autograd differentiates
the graph of stacked operations as usual. On a GPU the whole step, forward, backward and update, is captured
as a CUDA graph after a few steps, so that launching its thousands of kernels costs nothing. Everything a step
needs to know, its number and learning rates, is on the device.

If compiled, repeated blocks and updates are fused. A compiled function cannot be called inside `torch.vmap`,
but a custom autograd function with its own vmap rule can: the rule gets the stacked tensors, outside vmap,
and calls `compile(vmap(block))`. The blocks of all depths share one compilation.
"""

# M models, S seeds, n entries of one tensor

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.parametrize import type_before_parametrizations
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from theodolite.core.batches import Batch, targets_in
from theodolite.core.building import evaluated, untouched_randomness
from theodolite.core.calling import call, evaluate, logits, require_logits, with_tensors
from theodolite.core.higher_order import trainable_operators
from theodolite.core.metric_names import ACCURACY, TRAIN_ACCURACY
from theodolite.fleet.evaluation import share_right
from theodolite.fleet.stack import Stack, Tensors, vectorised
from theodolite.fleet.training import precision_of
from theodolite.optimizers.spec import Slot
from theodolite.workloads import Workload

ATTENTION = {
    "cpu": [SDPBackend.MATH],
    "cuda": [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH],
}
"""The kernels that are right and fast under vmap. The CPU's fused one is called once for each model; cuDNN's
gives nan, and the memory-efficient one raises an error (torch 2.11, H200)."""
EAGER_STEPS = 3
"""Steps before the step is captured: libraries initialise themselves during the first ones."""


class Program:
    """The models of a stack in training.

    Args:
        stack: the models; its tensors are changed in place.
        workload: their data and loss.
        device: where they are.
        compiled: compile the network's repeated blocks and the updates.
        draw: batches by seed and step, if they are kept; else the workload draws them.
    """

    def __init__(
        self,
        stack: Stack,
        workload: Workload,
        device: str,
        *,
        compiled: bool = False,
        draw: Callable[[int, int], Batch] | None = None,
    ) -> None:
        self._compiled = compiled
        if compiled:
            compile_blocks(stack.model)
        self.stack, self.workload, self.device = stack, workload, torch.device(device)
        self._draw = draw or workload.draw
        run = stack.runs[0]
        count, steps = len(stack.runs), run.steps
        self.seeds = list(dict.fromkeys(each.seed for each in stack.runs))
        self._seed_of = torch.tensor([self.seeds.index(each.seed) for each in stack.runs], device=device)
        self._weights = {one.name: one.values for one in stack.tensors}
        self._state = {
            one.name: {name: torch.zeros_like(one.values).flatten(1) for name in vectorised(one.rule).state}
            for one in stack.tensors
        }
        self._step = torch.zeros((), dtype=torch.long, device=device)
        self._alive = torch.ones(count, dtype=torch.bool, device=device)
        self._tempered = any(each.temperature != 1 for each in stack.runs)
        names = ["loss", *(["gradient"] if "gradient" in run.probes else [])]
        empty = torch.full((steps, count), math.nan, dtype=torch.float64, device=device)
        self.series = {name: empty.clone() for name in names}
        """By name, (steps, M), nan where a step has not been made."""
        self.targets: list[float] = []
        """How many targets each step had."""
        self._batch: list[Any] | None = None
        self._spec: Any = None
        self._shared_batch = False
        self._marks: list[tuple[Any, int]] = []
        self._graph: torch.cuda.CUDAGraph | None = None
        self._made = 0

    def step(self) -> None:
        """One step of every model that is alive."""
        self.targets.append(self._load())
        if self._graph is not None:
            self._graph.replay()
        elif self.device.type != "cuda":
            self._advance()
        elif self._made < EAGER_STEPS:
            # On another stream, as capturing asks of what comes before it.
            side = torch.cuda.Stream(self.device)
            side.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(side):
                self._advance()
            torch.cuda.current_stream(self.device).wait_stream(side)
        else:
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._advance()
            self._graph.replay()
        self._made += 1

    def alive(self) -> bool:
        """Is there a model left whose losses are all finite? Waits for the device."""
        return bool(self._alive.any())

    def held_out_losses(self) -> list[float]:
        """The mean loss of each model over the held-out batches."""
        return self._held_out_means(self._evaluate)

    @torch.no_grad()
    def accuracies(self) -> list[dict[str, float]]:
        """For each model its accuracy over the held-out batches, and over the last batch trained on."""
        held_out = self._held_out_means(self._right)
        if self._batch is None:
            self._load()  # before the first step, which reads it then
        with evaluated(self.stack.model):
            own = self._of_each(self._right, self._weights).tolist()
        return [{ACCURACY: one, TRAIN_ACCURACY: other} for one, other in zip(held_out, own, strict=True)]

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Evaluate in here along training: buffers and random number generators are restored."""
        held = {name: values.clone() for name, values in self.stack.buffers.items()}
        with untouched_randomness(self.stack.runs[0].seed):
            try:
                yield
            finally:
                for name, values in held.items():
                    self.stack.buffers[name].copy_(values)

    @contextlib.contextmanager
    def branch(self, factors: Mapping[int, Callable[[int], float]]) -> Iterator[None]:
        """Within, steps follow other schedules, by the places of models; then all is as before.

        Everything is restored in place, as a captured graph reads these tensors.
        """
        held = [*self._weights.values(), *self.stack.buffers.values(), self._step, self._alive]
        held += [tensor for state in self._state.values() for tensor in state.values()]
        held += [self.stack.factors, *self.series.values()]
        before, made, targets = [tensor.clone() for tensor in held], self._made, [*self.targets]
        for place, factor in factors.items():
            column = [factor(step) for step in range(len(self.stack.factors))]
            self.stack.factors[:, place].copy_(torch.tensor(column, dtype=self.stack.factors.dtype))
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, values in zip(held, before, strict=True):
                    tensor.copy_(values)
            self._made, self.targets = made, targets

    @torch.no_grad()
    def _held_out_means(self, function: Callable[..., Tensor]) -> list[float]:
        """The mean over held-out batches of a function of batch, weights, buffers and temperature."""
        found = []
        with evaluated(self.stack.model):
            for step in range(self.stack.runs[0].held_out):
                batch = tree_map(self._moved, self.workload.draw_held_out(step))
                with self._mode():
                    each = torch.vmap(partial(function, batch))
                    found.append(each(self._weights, dict(self.stack.buffers), self.stack.temperature))
        means: list[float] = torch.stack(found).double().mean(0).tolist()
        return means

    def _load(self) -> int:
        """Put the batches of this step, one for each seed, where the step reads them; how many targets."""
        batches = [self._draw(seed, self._made) for seed in self.seeds]
        drawn = [tree_flatten(batch) for batch in batches]
        leaves, self._spec = drawn[0]
        marks = [_mark(leaf) for others, _ in drawn for leaf in others]
        if _same(marks, self._marks):
            return targets_in(batches[0])
        self._marks = marks  # keeps the tensors alive, so that no other has their address
        # Workloads that train on all their data return the same tensors whatever the seed.
        self._shared_batch = all(
            mine is first for others, _ in drawn[1:] for mine, first in zip(others, leaves, strict=True)
        )
        per_seed = [leaves] if self._shared_batch else [one for one, _ in drawn]
        fresh = [
            torch.stack(column) if isinstance(column[0], Tensor) else _shared_by_all(column)
            for column in zip(*per_seed, strict=True)
        ]
        if self._batch is None or _shapes(self._batch) != _shapes(fresh):
            # New memory, which a captured graph does not read.
            self._batch, self._graph = [self._moved(leaf) for leaf in fresh], None
        else:
            for into, leaf in zip(self._batch, fresh, strict=True):
                if isinstance(leaf, Tensor):
                    pinned = leaf.pin_memory() if self.device.type == "cuda" and not leaf.is_cuda else leaf
                    into.copy_(pinned, non_blocking=True)
        return targets_in(batches[0])

    def _advance(self) -> None:
        """The step itself, in which nothing waits for the device."""
        weights = {name: values.detach().requires_grad_() for name, values in self._weights.items()}
        losses = self._of_each(self._evaluate, weights)
        gradients = torch.autograd.grad(losses.sum(), list(weights.values()))
        with torch.no_grad():
            detached = losses.detach()
            self._alive.logical_and_(detached.isfinite())
            self._note("loss", detached)
            flat = [gradient.flatten(1) for gradient in gradients]
            if "gradient" in self.series:
                squares = torch.stack([one.square().sum(1) for one in flat]).sum(0)
                self._note("gradient", squares.sqrt())
            hypers = [self._at_this_step(hyper) for hyper in self.stack.hypers]
            for one, gradient in zip(self.stack.tensors, flat, strict=True):
                self._update(one, gradient, dict(hypers[one.hyper]))
            self._step.add_(1)

    def _of_each(self, function: Callable[..., Tensor], weights: Mapping[str, Tensor]) -> Tensor:
        """A function of batch, weights, buffers and temperature for each model on its own batch, (M,)."""
        assert self._batch is not None
        leaves: list[Any] = []
        dims: list[int | None] = []  # where the models are in each leaf
        for leaf in self._batch:
            batched = isinstance(leaf, Tensor) and not self._shared_batch
            leaves.append(leaf[self._seed_of] if batched else leaf[0] if isinstance(leaf, Tensor) else leaf)
            dims.append(0 if batched else None)

        def of_one(tensors: Any, buffers: Any, temperature: Tensor, *leaves: Any) -> Tensor:
            return function(tree_unflatten(leaves, self._spec), tensors, buffers, temperature)

        with self._mode():
            return torch.vmap(of_one, in_dims=(0, 0, 0, *dims))(
                weights, dict(self.stack.buffers), self.stack.temperature, *leaves
            )

    def _evaluate(
        self, batch: Batch, weights: dict[str, Tensor], buffers: dict[str, Tensor], temperature: Tensor
    ) -> Tensor:
        if not self._tempered:
            loss: Tensor = with_tensors(
                self.stack.model, {**weights, **buffers}, partial(evaluate, self.workload.loss), batch
            )
            return loss
        require_logits(self.workload.loss, "A temperature")
        output = logits(with_tensors(self.stack.model, {**weights, **buffers}, call, batch[0]))
        return self.workload.loss(output / temperature, batch[1])

    def _right(
        self, batch: Batch, weights: dict[str, Tensor], buffers: dict[str, Tensor], temperature: Tensor
    ) -> Tensor:
        output = logits(with_tensors(self.stack.model, {**weights, **buffers}, call, batch[0]))
        return share_right(output, batch[1])

    def _at_this_step(self, hyper: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Hyperparameters with the schedule's factor, and Adam's corrections for the steps so far."""
        factor = self.stack.factors.index_select(0, self._step[None])[0]
        count = self._step + 1
        now = {**hyper, "lr": hyper["lr"] * factor[:, None].to(hyper["lr"].dtype), "count": count}
        for beta, name in (("beta1", "correction1"), ("beta2", "correction2")):
            if beta in hyper:
                now[name] = (1 - hyper[beta].double() ** count).to(hyper[beta].dtype)
        return now

    def _update(self, one: Tensors, gradient: Tensor, hyper: dict[str, Tensor]) -> None:
        """One tensor of all models by one step of its optimizer."""
        weight, state, alive = one.values.flatten(1), self._state[one.name], self._alive[:, None]
        slot = Slot(one.shape, one.shared, _fused if self._compiled else lambda function: function)
        vectorised(one.rule).step(weight, gradient, state, hyper, alive, slot)

    def _note(self, name: str, values: Tensor) -> None:
        series = self.series[name]
        series.index_copy_(0, self._step[None], values[None].to(series.dtype))

    def _moved(self, leaf: Any) -> Any:
        """A copy on the device: later batches are written into it."""
        return leaf.to(self.device, copy=True) if isinstance(leaf, Tensor) else leaf

    @contextlib.contextmanager
    def _mode(self) -> Iterator[None]:
        """The run's precision, and attention kernels that work under vmap."""
        # Autocast would free its cached weights, which a captured graph still reads.
        precision = precision_of(self.stack.runs[0], self.device.type, cached=False)
        attention = sdpa_kernel(ATTENTION["cpu" if self.device.type == "cpu" else "cuda"])
        with precision, attention, trainable_operators(self._batch):
            yield


def _mark(leaf: Any) -> tuple[Any, int]:
    """A leaf of a batch, and how often it was written to: a workload may fill the same tensor again."""
    return leaf, leaf._version if isinstance(leaf, Tensor) and not leaf.is_inference() else -1


def _same(marks: Sequence[tuple[Any, int]], others: Sequence[tuple[Any, int]]) -> bool:
    """Are they the same tensors, not written to since? Full batches come again at every step."""
    return len(marks) == len(others) and all(
        leaf is other and version == before >= 0
        for (leaf, version), (other, before) in zip(marks, others, strict=True)
    )


def _shapes(leaves: Sequence[Any]) -> list[Any]:
    """Shapes of tensors; values of everything else, which a captured graph holds as constants."""
    return [(leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves]


def _shared_by_all(values: Sequence[Any]) -> Any:
    if any(value != values[0] for value in values):
        raise ValueError(
            f"a batch holds {values[0]!r} for one seed and another value for others: only tensors may differ "
            "between models in one program"
        )
    return values[0]


@functools.cache
def _fused(function: Callable[..., Any]) -> Callable[..., Any]:
    """One kernel instead of a dozen that read and write the same memory.

    Sizes are symbols: one compilation serves tensors of all shapes, flattened to (M, n).
    """
    return torch.compile(function, dynamic=True)


def compile_blocks(model: nn.Module) -> int:
    """Replace the forward passes of repeated blocks, in place; the number of blocks that were replaced."""
    count = 0
    for blocks in repeated(model):
        region = _Region(blocks[0])
        for block in blocks:
            block.forward = _Entry(region, block)
            count += 1
    return count


def repeated(model: nn.Module) -> list[list[nn.Module]]:
    """Lists of two or more modules that differ in nothing but the values of their tensors.

    >>> blocks = [nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3)]
    >>> [len(found) for found in repeated(nn.Sequential(nn.Linear(2, 4), nn.ModuleList(blocks)))]
    [3]
    """
    found = []
    for name, module in model.named_modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module) > 1:
            start = f"{name}." if name else ""
            kinds = {_traits(block, f"{start}{place}.") for place, block in enumerate(module)}
            if len(kinds) == 1 and len(list(module[0].parameters())) > 1:
                found.append(list(module))
    return found


class _Entry:
    """The forward pass of one block."""

    def __init__(self, region: _Region, block: nn.Module) -> None:
        self.region, self.block = region, block

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        own = {**dict(self.block.named_parameters()), **dict(self.block.named_buffers())}
        leaves, spec = tree_flatten((own, args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        # Evaluation is not worth a compilation, and runs other code in batch norm and dropout.
        if not self.block.training or not any(map(torch._C._functorch.is_batchedtensor, tensors)):
            return type(self.block).forward(self.block, *args, **kwargs)
        places = tuple(place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
        others = tuple(None if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        return _Compiled.apply(self.region, (spec, places, others), *tensors)


class _Region:
    """A block and its compilations, one for each way its arguments are stacked."""

    def __init__(self, block: nn.Module) -> None:
        self.block = copy.deepcopy(block)
        self._compiled: dict[Any, Callable[..., Any]] = {}

    def stacked(self, layout: Any, in_dims: tuple[int | None, ...], tensors: tuple[Tensor, ...]) -> Tensor:
        spec, places, others = layout
        key = str(spec), others, in_dims
        if key not in self._compiled:
            block = self.block

            def call(*tensors: Tensor) -> Any:
                leaves = list(others)
                for place, tensor in zip(places, tensors, strict=True):
                    leaves[place] = tensor
                own, args, kwargs = tree_unflatten(leaves, spec)
                return functional_call(block, own, args, kwargs)

            self._compiled[key] = torch.compile(
                torch.vmap(call, in_dims=in_dims), fullgraph=True, dynamic=False
            )
        return self._compiled[key](*tensors)


class _Compiled(torch.autograd.Function):
    @staticmethod
    def forward(region: _Region, layout: Any, *tensors: Tensor) -> Tensor:
        raise NotImplementedError

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise NotImplementedError

    @staticmethod
    def vmap(info: Any, in_dims: Any, region: _Region, layout: Any, *tensors: Tensor) -> Any:
        return region.stacked(layout, in_dims[2:], tensors), 0


_MODULE = frozenset(vars(nn.Module()))


def _traits(block: nn.Module, prefix: str) -> tuple[Any, ...]:
    """Classes, shapes and all other attributes as printed, without the block's own name in them."""

    def shown(value: Any) -> str:
        return repr(value).replace(f"'{prefix}", "'")

    return tuple(
        (
            name,
            type_before_parametrizations(module),  # each parametrized module has a class of its own
            tuple((key, tuple(tensor.shape)) for key, tensor in module.named_parameters(recurse=False)),
            tuple(sorted((key, shown(value)) for key, value in vars(module).items() if key not in _MODULE)),
        )
        for name, module in block.named_modules()
    )
