"""A residual network with explicit multipliers, and updates of one step: plain, in float64.

    h_0 = α_in·W_in x + b_in,   h_l = h_{l−1} + F_l(h_{l−1}),   y = α_out·W_out h_L + b_out

F is `α_k·(W_k φ(… φ(W_1 h)) + b_k)`, one layer `α·(W φ(h) + b)`; with norms, F reads `γ∘h/rms(h)` and so does
the readout. Tensors of the blocks are stacked: one tensor per kind, blocks first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from theodolite.optimizers import OPTIMIZERS, Base, Hyper, Rule

from .parts import INPUTS, OUTPUTS, WIDTH, tensor

DEPTH = 4
"""At base size."""
SAMPLES = 4

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Network:
    """Its size, and how its tensors start."""

    width: int
    depth: int
    layers: int
    norms: bool = False
    rule: Rule = OPTIMIZERS["sgd"].rule
    """Multipliers and initial values are the same by every rule."""

    def kinds(self) -> list[str]:
        """All tensors by name. `hidden 0` and `bias 0` are the first of a branch."""
        names = ["input", "input bias", "output", "readout bias"]
        names += [f"{kind} {layer}" for layer in range(self.layers) for kind in ("hidden", "bias")]
        return [*names, "block gain", "final gain"] if self.norms else names

    def hyper(self, kind: str, rule: Rule | None = None, *, lr: float = 1.0, eps: float = 0.0) -> Hyper:
        """What a rule says about one tensor, before anything is absorbed."""
        name = kind
        if kind[-1].isdigit():
            last = int(kind[-1]) == self.layers - 1
            name = ("last " if last else "first ") + kind[:-2]
        part, ratios = tensor(name, self.width / WIDTH, self.depth / DEPTH, layers=self.layers)
        return (rule or self.rule)(part, ratios, Base(lr, 0.0, eps, std=self.deviation(kind)))

    def deviation(self, kind: str) -> float:
        """The initial std at base size.

        Branches start small, by 1/L (one layer: 1/√L) at the base depth as at all others: what they add at
        the start then shifts the stream by a few percent only, and slopes are those of the step alone.
        """
        if kind.startswith("hidden"):
            last = int(kind[-1]) == self.layers - 1
            branch = 1 / DEPTH if self.layers > 1 else 1 / math.sqrt(DEPTH)
            return WIDTH**-0.5 * (branch if last else 1.0)
        return {"input": INPUTS**-0.5, "output": WIDTH**-0.5}.get(kind, 0.0)

    def shape(self, kind: str) -> tuple[int, ...]:
        """Sizes of a tensor, blocks first."""
        n = self.width
        if kind.startswith("hidden"):
            return self.depth, n, n
        if kind.startswith("bias") or kind == "block gain":
            return self.depth, n
        return {"input": (n, INPUTS), "output": (OUTPUTS, n), "readout bias": (OUTPUTS,)}.get(kind, (n,))

    @cached_property
    def multipliers(self) -> dict[str, float]:
        """α of every tensor. To find them takes longer than a forward pass."""
        return {kind: self.hyper(kind).multiplier for kind in self.kinds()}

    def draw(self, seed: int) -> Tensors:
        """Initial values: normal weights, biases 0, gains 1."""
        generator = torch.Generator().manual_seed(seed)
        drawn = {}
        for kind in self.kinds():
            noise = torch.randn(self.shape(kind), generator=generator, dtype=torch.float64)
            drawn[kind] = noise * self.hyper(kind).std + (1.0 if kind.endswith("gain") else 0.0)
        return drawn

    def __call__(self, values: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Outputs, with every multiplier in its place."""
        alpha = self.multipliers
        h = alpha["input"] * x @ values["input"].T + alpha["input bias"] * values["input bias"]
        # Unbound once: indexing a stack in a loop makes its gradient slow.
        blocks = {k: values[k].unbind() for k in values if k[-1].isdigit() or k == "block gain"}
        for block in range(self.depth):
            z = _normed(h) * blocks["block gain"][block] if self.norms else h
            for layer in range(self.layers):
                if layer > 0 or self.layers == 1:
                    z = z.relu()
                weight, bias = f"hidden {layer}", f"bias {layer}"
                z = alpha[weight] * z @ blocks[weight][block].T + alpha[bias] * blocks[bias][block]
            h = h + z
        if self.norms:
            h = _normed(h) * values["final gain"]
        return alpha["output"] * h @ values["output"].T + alpha["readout bias"] * values["readout bias"]


def batch(seed: int) -> tuple[Tensor, Tensor]:
    """Inputs, and the derivative of the loss by the outputs.

    That derivative is held: the outputs at the start shrink with width, which would blur a squared error.
    """
    generator = torch.Generator().manual_seed(1000 + seed)
    x = torch.randn(SAMPLES, INPUTS, generator=generator, dtype=torch.float64)
    pull = torch.randn(SAMPLES, OUTPUTS, generator=generator, dtype=torch.float64)
    return x, pull


def gradients(
    network: Callable[..., Tensor], values: Mapping[str, Tensor], x: Tensor, pull: Tensor
) -> Tensors:
    """Of the loss `mean(pull·y)`."""
    leaves = {name: value.clone().requires_grad_() for name, value in values.items()}
    loss = (network(leaves, x) * pull).mean()
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


def curvatures(network: Callable[..., Tensor], values: Mapping[str, Tensor], x: Tensor) -> Tensors:
    """The diagonal of the Hessian of a squared error, its Gauss–Newton part: `mean_b Σ_k (∂y_bk/∂W)²`."""
    leaves = {name: value.clone().requires_grad_() for name, value in values.items()}
    found = {name: torch.zeros_like(value) for name, value in values.items()}
    for y in network(leaves, x).flatten():
        jacobian = torch.autograd.grad(y, list(leaves.values()), retain_graph=True)
        for name, entry in zip(leaves, jacobian, strict=True):
            found[name] += entry.square() / SAMPLES
    return found


def sizes_of_gradients(gradient: Tensor) -> tuple[float, float]:
    """The root mean square of its entries, and of its blocks' Frobenius norms."""
    entry = gradient.square().mean().sqrt().item()
    matrix = gradient.shape[-2:] if gradient.ndim > 1 else gradient.shape
    return entry, entry * math.sqrt(math.prod(matrix))


def _normed(h: Tensor) -> Tensor:
    return h / h.square().mean(-1, keepdim=True).sqrt()
