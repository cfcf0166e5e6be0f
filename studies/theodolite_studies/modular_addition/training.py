"""Networks that add modulo p, `logits = φ(X W_in) W_out`, trained on whole batches.

A pair (x, y) and its mirror image (y, x) are one input, so there is one row for each unordered pair, and the
loss counts it as often as it occurs among the ordered ones. This takes half of the time, and the gradients
are the same. Weights and activations are in float32. The loss is in float64: in float32 the error of a pair
that is right with a probability of 1 − 1e-8 is lost.
"""

# D width, N unordered pairs, P modulus

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional

Activation = Callable[[Tensor], Tensor]
ACTIVATIONS: dict[str, Activation] = {
    "relu": torch.relu,
    "square": torch.square,
    "|x|": torch.abs,
    "x²": torch.square,
    "x⁴": lambda values: values**4,
    "log(1 + e²ˣ)": lambda values: functional.softplus(2 * values),
    "eˣ": torch.exp,
    "gelu": functional.gelu,
    "x": lambda values: values,
    "x³": lambda values: values**3,
}
BETAS = (0.9, 0.98)
"""Of AdamW, as in the paper's code."""


@dataclass(frozen=True, eq=False)
class Pairs:
    """All unordered pairs of residues: one row for (x, y) and (y, x)."""

    modulus: int

    @cached_property
    def xy(self) -> Tensor:
        """(2, N), with x ≥ y."""
        return torch.tril_indices(self.modulus, self.modulus)

    @cached_property
    def inputs(self) -> Tensor:
        """`e_x + e_y`, (N, P)."""
        one_hot_PP = torch.eye(self.modulus)
        return one_hot_PP[self.xy[0]] + one_hot_PP[self.xy[1]]

    @cached_property
    def labels(self) -> Tensor:
        """`x + y mod P`."""
        return self.xy.sum(0) % self.modulus

    @cached_property
    def orderings(self) -> Tensor:
        """How many ordered pairs each is: 2, or 1 if x = y."""
        return 2 - (self.xy[0] == self.xy[1]).long()

    def split(self, fraction: float, seed: int, *, ordered: bool) -> Tensor:
        """How many orderings of each pair are trained on; the others are held out.

        With `ordered`, (x, y) and (y, x) are drawn apart, as in the paper; otherwise both or none is drawn.

        >>> pairs = Pairs(5)
        >>> pairs.orderings.sum(), pairs.split(0.6, 0, ordered=True).sum()
        (tensor(25), tensor(15))
        """
        generator = torch.Generator().manual_seed(seed)
        if not ordered:
            chosen = torch.randperm(len(self.labels), generator=generator)
            counts = torch.zeros_like(self.labels)
            trained = chosen[: round(fraction * len(counts))]
            counts[trained] = self.orderings[trained]
            return counts
        rows = torch.arange(len(self.labels)).repeat_interleave(self.orderings)
        chosen = rows[torch.randperm(len(rows), generator=generator)[: int(fraction * len(rows))]]
        return torch.bincount(chosen, minlength=len(self.labels))


@dataclass(frozen=True, eq=False)
class Adder:
    """The two weights of a network and its activation."""

    w_in: Tensor
    """(P, D)."""
    w_out: Tensor
    """(D, P)."""
    activation: str

    @property
    def weights(self) -> tuple[Tensor, Tensor]:
        """Both."""
        return self.w_in, self.w_out

    @property
    def norm(self) -> float:
        """Of all weights."""
        return torch.cat([weight.detach().flatten() for weight in self.weights]).norm().item()

    def logits(self, inputs: Tensor) -> Tensor:
        """(N, P)."""
        return ACTIVATIONS[self.activation](inputs @ self.w_in) @ self.w_out

    def copy(self) -> Adder:
        """With weights of its own, which are not trained."""
        return Adder(self.w_in.detach().clone(), self.w_out.detach().clone(), self.activation)


def start(
    modulus: int,
    width: int,
    activation: str,
    *,
    std_in: float,
    std_out: float,
    seed: int,
    equal: bool = False,
) -> Adder:
    """A network with normal weights.

    With `equal` all frequencies have instead the amplitude that normal weights have in the root mean
    square, `std·2/√P`, phases are uniform, and the mean is zero.
    """
    generator = torch.Generator().manual_seed(seed)

    def drawn(std: float) -> Tensor:
        if not equal:
            return std * torch.randn(width, modulus, generator=generator)
        phase = 2 * torch.pi * torch.rand(width, modulus // 2, 1, generator=generator)
        angle = 2 * torch.pi * torch.arange(1, modulus // 2 + 1)[:, None] * torch.arange(modulus) / modulus
        return 2 * std / modulus**0.5 * torch.cos(angle + phase).sum(1)

    w_in, w_out = (drawn(std) for std in (std_in, std_out))
    return Adder(w_in.T.contiguous().requires_grad_(), w_out.contiguous().requires_grad_(), activation)


def adamw(network: Adder, lr: float, decay: float = 0.0) -> torch.optim.Optimizer:
    """AdamW with the paper's momentum."""
    return torch.optim.AdamW(network.weights, lr=lr, betas=BETAS, weight_decay=decay, fused=True)


def sgd(network: Adder, lr: float) -> torch.optim.Optimizer:
    """Plain gradient descent: all batches are whole."""
    return torch.optim.SGD(network.weights, lr=lr)


def train(
    network: Adder,
    pairs: Pairs,
    counts: Tensor,
    optimizer: torch.optim.Optimizer,
    steps: int,
    stops: Collection[int],
) -> Iterator[int]:
    """Train in place; give the number of steps that were made at each of the stops and after the last one."""
    used = counts > 0
    inputs, labels = pairs.inputs[used], pairs.labels[used]
    weights = counts[used].double() / counts.sum()
    for step in range(steps):
        if step in stops:
            yield step
        optimizer.zero_grad()
        losses = functional.cross_entropy(network.logits(inputs).double(), labels, reduction="none")
        (losses @ weights).backward()
        optimizer.step()
    yield steps
