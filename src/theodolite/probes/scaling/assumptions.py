"""What the theory of width–depth scaling assumes about training, as measurements.

It is derived for one step of a linear network on one example. To hold for real training it assumes

    F.1  updates do not cancel      ‖W₀ + ΔW‖_R ~ ‖W₀‖_R + ‖ΔW‖_R, and the same for features
    F.2  activations keep the size  ‖φ(h)‖ ~ ‖h‖
    F.3  examples agree             ‖(1/B) Σ g_i‖_R ~ (1/B) Σ ‖g_i‖_R, with g_i the gradient of example i

where `~` means that the ratio of both sides neither vanishes nor grows with the size of the network. Here are
the ratios, to be compared between sizes. By the triangle inequality those of F.1 and F.3 are at most 1.

References:
    Spectral condition for muP under width–depth scaling, appendix F.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from theodolite.anatomy import Anatomy, dissect
from theodolite.anatomy.names import canonical_modules, canonical_parameters
from theodolite.anatomy.part import Role
from theodolite.core import arguments
from theodolite.core.batches import Batch, on_device
from theodolite.core.building import evaluated, untouched_randomness
from theodolite.core.calling import call
from theodolite.core.errors import UseError
from theodolite.core.examples import take
from theodolite.core.exclusive import exclusive
from theodolite.core.higher_order import plain_operators
from theodolite.planning.plan import Plan
from theodolite.present.result import Block, Result
from theodolite.present.text import Table, counted
from theodolite.probes.scaling.first_steps import rms
from theodolite.probes.scaling.spectral_norm import rms_norms
from theodolite.workloads import Workload

ACTIVATIONS = frozenset(
    ["relu", "gelu", "silu", "mish", "elu", "celu", "leaky_relu", "softplus", "hardswish", "tanh", "sigmoid"]
)
"""By the names of torch's operations."""
MOST_EXAMPLES = 8
"""Examples whose gradients are computed one by one."""


@dataclass(frozen=True)
class Assumptions(Result):
    """The ratios of F.1 to F.3 after some steps of training. Made by `assumptions`."""

    kind: ClassVar[str] = "assumptions"
    loads: ClassVar[bool] = True
    steps: int
    weights: Mapping[str, float]
    """F.1, by tensor."""
    features: Mapping[str, float]
    """F.1, by the module whose output it is, on the first batch."""
    activations: tuple[float, ...]
    """F.2: root mean square after over before, in the order of the forward pass."""
    alignment: Mapping[str, float]
    """F.3, by tensor; tensors without a gradient are left out."""

    def blocks(self) -> Iterator[Block]:
        """The range of every ratio."""
        yield f"Assumptions of width–depth scaling after {counted(self.steps, 'step')}, as ratios"
        activations = {f"activation {index}": ratio for index, ratio in enumerate(self.activations)}
        named = {
            "F.1 weights": self.weights,
            "F.1 features": self.features,
            "F.2 activations": activations,
            "F.3 alignment": self.alignment,
        }
        yield Table(
            ("assumption", "ratios", "least", "median", "largest", "least at"),
            [
                (name, len(ratios), min(all_), median(all_), max(all_), min(ratios, key=ratios.__getitem__))
                for name, ratios in named.items()
                if (all_ := list(ratios.values()))
            ],
        )
        yield "A ratio should neither vanish nor grow with the size of the network: compare sizes."

    def table(self) -> Table:
        """The ratios of weights and gradients by tensor, and of features by module."""
        names = dict.fromkeys((*self.weights, *self.alignment, *self.features))
        columns = self.weights, self.alignment, self.features
        return Table(
            ("name", "F.1 weight", "F.3 alignment", "F.1 feature"),
            [(name, *(column.get(name) for column in columns)) for name in names],
        )


@exclusive()
def assumptions(
    workload: Workload,
    plan: Plan,
    *,
    steps: int = 8,
    seed: int = 0,
    device: str = "cpu",
    roles: Mapping[str, Role] | None = None,
) -> Assumptions:
    """Train a new network under a plan, and measure F.1 to F.3 after the last step.

    Args:
        workload: what is trained; all tensors of its batches have the examples along their first dimension.
        plan: how the network starts and is trained.
        steps: steps of training; F.1 speaks of the change over all of them.
        seed: of the initial weights and of the batches.
        device: where to train.
        roles: of tensors that `dissect` cannot classify.

    >>> import theodolite as th
    >>> mlp = th.workload("mlp-mixture")
    >>> plan = th.plan(mlp.build, mlp.batch(0, 0)[0], size=mlp.size, base=mlp.size, lr=2**-8)
    >>> found = assumptions(mlp, plan, steps=2)
    >>> all(0 < ratio <= 1 for ratio in found.alignment.values())
    True
    """
    arguments.whole("steps", steps, least=0)
    first = on_device(workload.draw(seed, 0), device)
    known = workload.roles_with(roles)
    anatomy = dissect(workload.build, workload.draw(seed, 0)[0], size=plan.size, roles=known)
    with untouched_randomness(seed):
        model = plan.build(seed, device=device).train()
        optimizer = plan.optimizer(model, check_gradients=False)  # a divergence is a result
        tensors = dict(canonical_parameters(model))
        start = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        features = _features(model, first[0])
        for step in range(steps):
            optimizer.zero_grad()
            loss = workload.evaluate(model, on_device(workload.draw(seed, step), device))
            loss.backward()
            optimizer.step()
        return Assumptions(
            steps,
            weights=_sum_ratios(start, tensors, lambda values: _norms(values, anatomy)),
            features=_sum_ratios(features, _features(model, first[0]), _root_mean_squares),
            activations=_activations(model, first[0]),
            alignment=_alignment(workload, model, first, anatomy),
        )


def _sum_ratios(
    before: Mapping[str, Tensor],
    after: Mapping[str, Tensor],
    measure: Callable[[Mapping[str, Tensor]], Mapping[str, float]],
) -> dict[str, float]:
    """`‖a + d‖/(‖a‖ + ‖d‖)`, d being the change; tensors that are zero before and after are left out."""
    together = {name: after[name].detach() for name in before if name in after}
    whole = measure(together)
    first = measure({name: before[name] for name in together})
    change = measure({name: value.float() - before[name].float() for name, value in together.items()})
    bounds = {name: first[name] + change[name] for name in together}
    return {name: whole[name] / bound for name, bound in bounds.items() if bound > 0}


def _norms(values: Mapping[str, Tensor], anatomy: Anatomy) -> dict[str, float]:
    return {name: value for name, (value, _) in rms_norms(values, anatomy).items()}


def _root_mean_squares(values: Mapping[str, Tensor]) -> dict[str, float]:
    return dict(zip(values, rms(*values.values()), strict=True))


@torch.no_grad()
def _features(model: nn.Module, inputs: Any) -> dict[str, Tensor]:
    """The output of each module with a weight of its own; of a module called twice, the last."""
    found: dict[str, Tensor] = {}

    def keep(name: str, module: nn.Module, arguments: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            found[name] = output.detach().clone()

    handles = [
        module.register_forward_hook(partial(keep, name))
        for name, module in canonical_modules(model)
        if any(tensor is not None and tensor.ndim > 1 for tensor in module._parameters.values())
    ]
    try:
        with evaluated(model):
            call(model, inputs)
    finally:
        for handle in handles:
            handle.remove()
    return found


@torch.no_grad()
def _activations(model: nn.Module, inputs: Any) -> tuple[float, ...]:
    ratios: list[float] = []

    class Recording(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            # In place as well (`relu_`), so the size before is taken before.
            known = func.overloadpacket.__name__.rstrip("_") in ACTIVATIONS
            before = rms(args[0])[0] if known else 0.0
            result = func(*args, **(kwargs or {}))
            if before > 0:
                ratios.append(rms(result)[0] / before)
            return result

    with evaluated(model), plain_operators(), Recording():
        call(model, inputs)
    return tuple(ratios)


def _alignment(workload: Workload, model: nn.Module, batch: Batch, anatomy: Anatomy) -> dict[str, float]:
    examples = [take(batch, [index]) for index in range(min(_num_examples(workload, batch), MOST_EXAMPLES))]
    tensors = dict(canonical_parameters(model))
    total = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    sizes = dict.fromkeys(tensors, 0.0)
    with evaluated(model):
        for example in examples:
            loss = workload.evaluate(model, example)
            found = torch.autograd.grad(loss, list(tensors.values()), materialize_grads=True)
            gradients = dict(zip(tensors, found, strict=True))
            for name, size in _norms(gradients, anatomy).items():
                total[name] += gradients[name]
                sizes[name] += size
    together = _norms(total, anatomy)
    return {name: together[name] / sizes[name] for name in tensors if sizes[name] > 0}


def _num_examples(workload: Workload, batch: Batch) -> int:
    counts = {leaf.shape[0] if leaf.ndim else 0 for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)}
    if len(counts) != 1 or 0 in counts:
        raise UseError(
            f"workload {workload.name!r}: the tensors of a batch have first dimensions {sorted(counts)}, so "
            "its examples are ambiguous. Let dimension 0 of every tensor be the examples"
        )
    return counts.pop()
