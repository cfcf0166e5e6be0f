"""A loss as a function of some of a model's parameters, on one batch or several.

The model itself is not changed. Its forward pass runs on tensors in place of its parameters and buffers
(`torch.func.functional_call`), with random numbers from a fixed seed, with the attention kernel that has a
second derivative, and with compiled code, which has none, run uncompiled.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from theodolite.anatomy.names import all_parameter_names, canonical_parameters, unwrap
from theodolite.core.arguments import did_you_mean, positive
from theodolite.core.batches import Batch, Batches, on_device
from theodolite.core.building import seed_generators, untouched_randomness
from theodolite.core.calling import (
    Loss,
    ModelLoss,
    OutputLoss,
    call,
    described,
    evaluate,
    logits,
    require_logits,
    with_tensors,
)
from theodolite.core.errors import UseError
from theodolite.core.examples import batches_of, count_examples, each_batch, num_examples
from theodolite.core.higher_order import plain_operators, without_checkpoints
from theodolite.core.replicas import group_of, together
from theodolite.probes.curvature.score import CrossEntropy, LogitLoss, recognise

T = TypeVar("T")

SEED = 0
"""Seed of each forward pass: a dropout mask is the same in all passes."""


class Objective:
    """The function that is differentiated. Its arguments are those of `hessian`."""

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        batch: Batches,
        *,
        parameters: str | Sequence[str] | None = None,
        temperature: float = 1.0,
    ) -> None:
        self.temperature = positive("temperature", temperature)
        if not isinstance(model, nn.Module):
            raise UseError(f"model is {described(model)}, not a torch.nn.Module")
        _refuse(model)
        self.group = group_of(model)
        self.given = model
        """The model, wrapped as it was given."""
        self.model = unwrap(model)
        # Probes do not change the buffers of a loss.
        has_buffers = isinstance(loss, nn.Module) and next(loss.buffers(), None) is not None
        self.given_loss = copy.deepcopy(loss) if has_buffers else loss
        self.of_logits = not isinstance(loss, OutputLoss | ModelLoss)
        """Is it a loss of the logits? If not, `forward` returns the loss itself."""
        if temperature != 1:
            require_logits(loss, "A temperature")
        self.loss: LogitLoss = self.given_loss if self.of_logits else lambda value, targets: value
        """The loss of what `forward` returns."""
        self.batches = batch = _one_pair(batch)
        self.single = isinstance(batch, tuple) and len(batch) == 2
        if not self.single:
            batches_of(batch)  # can they be iterated more than once?
        own = {id(tensor): name for name, tensor in self.model.named_parameters()}
        self._all = {name: own[id(tensor)] for name, tensor in canonical_parameters(model)}
        """The model's own names by canonical name; they differ if a submodule is wrapped."""
        self.names = chosen_names(model, parameters)
        self.shapes = {name: tensor.shape for name, tensor in self.tensors.items()}
        self.size = sum(tensor.numel() for tensor in self.tensors.values())
        (first, one), *others = self.tensors.items()
        self.dtype, self.device = one.dtype, one.device
        for name, other in others:
            if (other.dtype, other.device) != (one.dtype, one.device):
                raise UseError(
                    f"{first} is {one.dtype} on {one.device} and {name} {other.dtype} on {other.device}: "
                    "vectors need one dtype and one device. Choose among them with parameters=…"
                )

    def at(self, temperature: float) -> Objective:
        """The same at another temperature."""
        return Objective(
            self.given, self.given_loss, self.batches, parameters=self.names, temperature=temperature
        )

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The chosen parameters, as the model has them now."""
        every = dict(canonical_parameters(self.given))
        return {name: every[name] for name in self.names}

    @property
    def state(self) -> tuple[object, ...]:
        """A key that changes with the parameters, the buffers, the batch, the hooks and the mode."""
        batch = tree_leaves(self.batches) if self.single else []
        tensors = [*self.model.parameters(), *self.model.buffers()]
        tensors += [leaf for leaf in batch if isinstance(leaf, Tensor)]
        modes = tuple(
            (module.training, *module._forward_hooks, *module._forward_pre_hooks)
            for module in self.model.modules()
        )
        return (*((tensor.data_ptr(), tensor._version) for tensor in tensors), modes)

    def draw(self) -> Iterator[tuple[Batch, float]]:
        """The batches on the model's device, each with its share of all examples."""
        if self.single:
            yield on_device(self.batches, str(self.device)), 1.0
            return
        count = count_examples(self.batches)
        for pair in each_batch(self.batches):
            yield on_device(pair, str(self.device)), num_examples(pair) / count

    def stand_ins(self, *, grad: bool) -> dict[str, Tensor]:
        """New tensors that share memory with the chosen parameters, by canonical name."""
        return {name: tensor.detach().requires_grad_(grad) for name, tensor in self.tensors.items()}

    def forward(self, chosen: Mapping[str, Tensor], batch: Batch) -> Tensor:
        """The logits over the temperature, with the chosen parameters replaced. Call under `conditions`.

        If the loss is not one of the logits: the loss itself, as a tensor without dimensions.
        """
        seed_generators(SEED)
        state: dict[str, Tensor] = {name: tensor.detach() for name, tensor in self.model.named_parameters()}
        state |= {name: buffer.detach().clone() for name, buffer in self.model.named_buffers()}
        state |= {self._all[name]: tensor for name, tensor in chosen.items()}
        if not self.of_logits:
            value: Tensor = with_tensors(self.model, state, partial(evaluate, self.given_loss), batch)
            return value
        found = logits(with_tensors(self.model, state, call, batch[0]))
        return found if self.temperature == 1 else found / self.temperature

    def value(self, found: Tensor, batch: Batch) -> Tensor:
        """The loss of what `forward` returned, as a tensor without dimensions."""
        value = self.loss(found, batch[1])
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise UseError(
                f"loss(logits, targets) returned {described(value)}, not one number. Reduce it, as with "
                ".mean()"
            )
        return value.reshape(())

    def evaluate(self, found: Tensor, batch: Batch) -> float:
        """The loss of logits as a number, which has to be finite."""
        value = self.value(found.detach(), batch)
        if value.requires_grad and (other := _reached(value, self.model)):
            raise UseError(
                f"the loss depends on {other} besides by the logits, and what it adds to the curvature would "
                "be lost. Take such a term out of the loss: a penalty λ/2·‖θ‖² adds λ to every eigenvalue"
            )
        number = float(value)
        if not math.isfinite(number):
            raise UseError(
                f"the loss is {number}: there is no curvature to measure. Look at the batch, at the weights, "
                f"or at the temperature ({self.temperature:g})"
            )
        return number

    def gradient(self) -> Tensor:
        """The gradient (P,) by one backward pass for each batch of this process."""
        chosen = self.stand_ins(grad=True)
        total = torch.zeros(self.size, dtype=self.dtype, device=self.device)
        with self.conditions():
            for batch, share in self.draw():
                value = self.loss(self.forward(chosen, batch), batch[1])
                if not value.requires_grad:
                    raise UseError("the loss does not depend on the model's parameters")
                found = torch.autograd.grad(share * value, list(chosen.values()), materialize_grads=True)
                total += torch.cat([one.reshape(-1) for one in found])
        return total

    def cross_entropy(self, found: Tensor, batch: Batch) -> CrossEntropy | None:
        """The loss on this batch as a cross-entropy, if it is one."""
        return recognise(self.loss, found.detach(), batch[1])

    @contextlib.contextmanager
    def conditions(self) -> Iterator[None]:
        """Settings for a forward pass that can be differentiated twice and has no side effects."""
        with untouched_randomness(), twice_differentiable():
            yield

    def together(self, act: Callable[[], T]) -> T:
        """Return `act()`; if the model is one of several replicas, all of them fail or none does."""
        return together(self.given, act)

    def averaged(self, find: Callable[[], Tensor]) -> Tensor:
        """The mean over ranks of what each finds; if one rank fails, all do."""
        tensor = self.together(find)
        if self.group is not None:
            torch.distributed.all_reduce(tensor, group=self.group)
            tensor /= torch.distributed.get_world_size(self.group)
        return tensor

    def flat(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """A dict by name as one vector (P,)."""
        self.check(tensors)
        return torch.cat([tensors[name].reshape(-1) for name in self.names]).to(self.device, self.dtype)

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Refuse a dict whose names or shapes are not those of the chosen parameters."""
        if set(tensors) != set(self.names):
            odd = sorted(set(tensors) ^ set(self.names))[0]
            raise UseError(
                f"{odd!r} is {'not ' if odd not in tensors else ''}among the tensors given, and "
                f"{'' if odd in self.names else 'not '}among the {len(self.names)} parameters of the operator"
            )
        for name in self.names:
            if tensors[name].shape != self.shapes[name]:
                raise UseError(
                    f"{name} has the shape {tuple(tensors[name].shape)} in the vector and "
                    f"{tuple(self.shapes[name])} in the model"
                )

    def split(self, flat: Tensor) -> dict[str, Tensor]:
        """A vector (P,), or several (…, P), by name and in shape (…, *shape)."""
        pieces = flat.split([shape.numel() for shape in self.shapes.values()], dim=-1)
        return {
            name: piece.unflatten(-1, shape) if shape else piece[..., 0]
            for (name, shape), piece in zip(self.shapes.items(), pieces, strict=True)
        }


@contextlib.contextmanager
def twice_differentiable() -> Iterator[None]:
    """Settings for a forward pass that can be differentiated twice: kernels that have a second derivative."""
    with (
        sdpa_kernel(SDPBackend.MATH),
        _PlainWeightNorm(),
        without_checkpoints(),
        plain_operators(),
        torch.enable_grad(),
    ):
        yield


class _PlainWeightNorm(TorchFunctionMode):
    """Weight norm by plain operations: the second derivative of torch's fused one is wrong (torch 2.13)."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch._weight_norm:
            direction, gain, dim = (*args, 0)[:3]
            return direction * (gain / torch.norm_except_dim(direction, 2, dim))
        return func(*args, **(kwargs or {}))


def _nodes(output: Tensor) -> Iterator[Any]:
    """Every node of a tensor's autograd graph, once."""
    waiting: list[Any] = [output.grad_fn]
    seen: set[Any] = {None}
    while waiting:
        if (node := waiting.pop()) not in seen:
            seen.add(node)
            yield node
            waiting += [above for above, _ in node.next_functions]


def own_functions(output: Tensor) -> list[Any]:
    """The nodes of a tensor's graph that come from an `autograd.Function` written by the user."""
    own = torch.autograd.function.BackwardCFunction
    return [node for node in _nodes(output) if isinstance(node, own)]


def _reached(value: Tensor, model: nn.Module) -> str | None:
    """The first of a model's parameters that a value depends on."""
    names = {id(tensor): name for name, tensor in model.named_parameters()}
    met = (names.get(id(getattr(node, "variable", None))) for node in _nodes(value))
    return next((name for name in met if name is not None), None)


def _one_pair(batch: Any) -> Any:
    """A list of two tensors, as a DataLoader gives, becomes a pair; a list of two pairs stays."""
    if not (isinstance(batch, list) and len(batch) == 2):
        return batch
    first, second = batch
    paired = isinstance(first, (tuple, list)) and len(first) == 2 and not isinstance(second, Tensor)
    return batch if paired else (first, second)


def chosen_names(model: nn.Module, patterns: str | Sequence[str] | None) -> tuple[str, ...]:
    """Canonical names that match fnmatch patterns; all that require a gradient if None."""
    tensors = dict(canonical_parameters(model))
    if not tensors:
        raise UseError(
            f"{type(unwrap(model)).__name__} has no parameters, so there is nothing to differentiate"
        )
    if patterns is None:
        names = [name for name, tensor in tensors.items() if tensor.requires_grad]
        if not names:
            raise UseError(
                f"none of the {len(tensors)} parameters requires a gradient. Name those that are meant with "
                "parameters=…, as in parameters=['blocks.*']"
            )
    else:
        patterns = [patterns] if isinstance(patterns, str) else list(patterns)
        aliases = list(all_parameter_names(model))
        wanted: set[int] = set()
        for pattern in patterns:
            met = {id(tensor) for name, tensor in aliases if name == pattern or fnmatchcase(name, pattern)}
            if not met:
                hint = did_you_mean(pattern, [name for name, _ in aliases])
                hint = hint or f" The first is {aliases[0][0]!r}"
                raise UseError(f"parameters: {pattern!r} matches none of the {len(tensors)} names.{hint}")
            wanted |= met
        names = [name for name, tensor in tensors.items() if id(tensor) in wanted]
        if not names:
            raise UseError("parameters is empty: give at least one pattern, or leave it out for all of them")
    for name in names:
        if not tensors[name].is_floating_point():
            raise UseError(
                f"{name} is {tensors[name].dtype}: only floating-point parameters have derivatives. Leave "
                "it out with parameters=…"
            )
    return tuple(names)


def _refuse(model: nn.Module) -> None:
    """Refuse models whose loss is no function of their parameters, or cannot be differentiated twice."""
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
            raise UseError(
                f"{name} is {module}, which changes its weights in every forward pass (max_norm), so the "
                "loss is no function of them. Set its max_norm to None while you measure"
            )
    for name, tensor in model.named_parameters():
        if type(tensor).__name__ in ("DTensor", "FlatParameter"):
            raise UseError(
                f"{name} is sharded ({type(tensor).__name__}), and what gathers shards during a backward "
                "pass cannot be differentiated again. Measure an unsharded copy: build the model again, and "
                "load torch.distributed.checkpoint.state_dict.get_model_state_dict(model, "
                "options=StateDictOptions(full_state_dict=True)) into it"
            )
