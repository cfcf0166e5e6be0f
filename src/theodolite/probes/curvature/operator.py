"""The Hessian of a loss as an operator, and its two parts.

With logits `z(θ)` and loss `ℓ(z)`, `J = ∂z/∂θ`, `B = ∂²ℓ/∂z²`:

    H = G + S,   G = Jᵀ B J   (Gauss–Newton),   S = Σ_k ∂ℓ/∂z_k ∇²z_k   (residual)

A product is a second backward pass through the graph of the first, which is kept from one product to the
next. `jvp(jacrev)` and `grad(jvp)` are not used: both are wrong through LayerNorm and BatchNorm (torch 2.13).
"""

from __future__ import annotations

import contextlib
import functools
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from theodolite.core.batches import Batch, Batches
from theodolite.core.calling import Loss, described
from theodolite.core.errors import UseError
from theodolite.core.exclusive import exclusive
from theodolite.core.replicas import on_all_ranks
from theodolite.probes.curvature.objective import Objective, own_functions
from theodolite.probes.curvature.score import score

Kind = Literal["hessian", "gauss_newton", "residual", "fisher"]
Vector = TypeVar("Vector", Tensor, dict[str, Tensor])

MOST_AT_ONCE = 64
"""Vectors that are multiplied at once on a GPU; halved when it runs out of memory."""


class Operator:
    """A symmetric matrix over named parameters, given by its products with vectors.

    `operator @ v` takes a vector (P,), a block of vectors (P, k) or a dict of tensors by name, and returns
    the same. It uses the weights that the model has at the time of the product, except for changes through
    `.data`, which torch does not count as changes.
    """

    def __init__(self, source: Derivatives, kind: Kind) -> None:
        self._source, self._kind = source, kind
        objective = source.objective
        self._model = objective.given
        self.names = objective.names
        """Canonical names of the parameters, in the order of a vector."""
        self.shapes = objective.shapes
        self.size = objective.size
        """P, the number of entries of a vector."""
        self.dtype, self.device = objective.dtype, objective.device
        self.flat, self.split = objective.flat, objective.split
        """A dict of tensors by name as one vector (P,), and back."""
        self.products = 0
        """The number of products so far."""

    def __matmul__(self, vector: Vector) -> Vector:
        if isinstance(vector, Mapping):
            return self.split(self @ self.flat(vector))
        if not isinstance(vector, Tensor):
            raise UseError(
                f"an operator is multiplied by a tensor or a dict by name, not by {described(vector)}"
            )
        if vector.ndim not in (1, 2) or vector.shape[0] != self.size:
            raise UseError(
                f"the vector has the shape {tuple(vector.shape)}, and the operator is over {self.size:,} "
                f"parameters: give ({self.size},), ({self.size}, k) or a dict by name"
            )
        block = vector.to(self.device, self.dtype)
        rows = block[None] if block.ndim == 1 else block.mT.contiguous()
        self.products += len(rows)
        found = self._source.mean(lambda point: self._source.block(point, self._kind, rows))
        return found[0] if vector.ndim == 1 else found.mT

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._kind}, {self.size:,} parameters in {len(self.names)} tensors)"


class Hessian(Operator):
    """The Hessian `H = G + S` of a loss. Made by `hessian`."""

    def __init__(self, objective: Objective) -> None:
        super().__init__(Derivatives(objective), "hessian")

    @property
    def gauss_newton(self) -> Operator:
        """`G = Jᵀ B J`, positive semi-definite where the loss is convex in the logits."""
        return Operator(self._source, "gauss_newton")

    @property
    def fisher(self) -> Operator:
        """The empirical Fisher matrix, the mean of `gᵢ gᵢᵀ` over the gradients of single examples.

        An example is an entry of the logits' first dimension, and the loss has to be the mean over them.
        """
        return Operator(self._source, "fisher")

    @property
    def residual(self) -> Operator:
        """`S = H − G`."""
        return Operator(self._source, "residual")

    @property
    def gradient(self) -> Tensor:
        """The gradient of the loss, (P,)."""
        return self._source.mean(lambda point: _joined(point.slope).detach())

    @property
    def loss(self) -> float:
        """The loss."""
        return float(self._source.mean(lambda point: point.loss))


@exclusive()
@on_all_ranks
def hessian(
    model: nn.Module,
    loss: Loss,
    batch: Batches,
    *,
    parameters: str | Sequence[str] | None = None,
    temperature: float = 1.0,
) -> Hessian:
    """The Hessian of a model's loss as an operator over its parameters.

    Args:
        model: any module, in train or eval mode as it is. Dropout has one fixed mask. A compiled model is
            differentiated uncompiled. Under DDP products are averaged over ranks.
        loss: `loss(logits, targets) -> scalar`.
        batch: `(inputs, targets)`, or several such pairs in a list or a DataLoader: the mean over examples.
        parameters: patterns of names, as in `"blocks.*"`; all that require a gradient if left out.
        temperature: the loss is taken of logits/temperature.

    >>> model = nn.Linear(2, 1, bias=False).double()
    >>> batch = torch.eye(2).double(), torch.zeros(2, 1).double()
    >>> H = hessian(model, nn.functional.mse_loss, batch)
    >>> H @ torch.tensor([1.0, 2.0], dtype=torch.float64)
    tensor([1., 2.], dtype=torch.float64)
    >>> H.residual @ torch.tensor([1.0, 2.0], dtype=torch.float64)
    tensor([0., 0.], dtype=torch.float64)
    """
    return Hessian(Objective(model, loss, batch, parameters=parameters, temperature=temperature))


def operator_of(
    model: Operator | nn.Module,
    loss: Loss | None = None,
    batch: Batches | None = None,
    *,
    parameters: str | Sequence[str] | None = None,
    temperature: float = 1.0,
) -> Operator:
    """An operator as it is, or the Hessian of a model."""
    if isinstance(model, nn.Module):
        if loss is None or batch is None:
            raise UseError("a model is measured with a loss and a batch: give (model, loss, batch)")
        return hessian(model, loss, batch, parameters=parameters, temperature=temperature)
    if not hasattr(model, "__matmul__") or not hasattr(model, "size"):
        raise UseError(f"model is {described(model)}: give a torch.nn.Module or an operator")
    if loss is not None or batch is not None or parameters is not None or temperature != 1:
        raise UseError("an operator has its loss, batch, parameters and temperature already: leave them out")
    return model


class Derivatives:
    """The graphs of an objective: kept for one batch, made again for each product for several."""

    def __init__(self, objective: Objective) -> None:
        self.objective = objective
        self._last: tuple[tuple[object, ...], BatchDerivatives] | None = None
        self._at_once = MOST_AT_ONCE
        self._batched: dict[Kind, bool] = {}

    @exclusive()
    def mean(self, measure: Callable[[BatchDerivatives], Tensor]) -> Tensor:
        """The mean over all batches and ranks of what is measured on each."""

        def own() -> Tensor:
            if self.objective.single:
                return measure(self._point())
            draw = self.objective.draw()
            found = (share * measure(BatchDerivatives(self.objective, batch)) for batch, share in draw)
            return functools.reduce(torch.add, found)

        return self.objective.averaged(own)

    def _point(self) -> BatchDerivatives:
        state = self.objective.state
        if self._last is None or self._last[0] != state:
            self._last = None  # frees its graph before the next is made
            ((batch, _),) = self.objective.draw()
            self._last = state, BatchDerivatives(self.objective, batch)
        return self._last[1]

    def block(self, point: BatchDerivatives, kind: Kind, rows: Tensor) -> Tensor:
        """Products with rows, (k, P) → (k, P)."""
        # On a CPU a block of vectors is no faster than one after the other, and takes more memory.
        if len(rows) == 1 or rows.device.type == "cpu" or not self._batches(point, kind, rows[:2]):
            return torch.stack([self._product(point, kind, row) for row in rows])
        found: list[Tensor] = []
        done = 0
        while done < len(rows):
            some = rows[done : done + self._at_once]
            try:
                found.append(self._product(point, kind, some, many=True))
                done += len(some)
            except torch.OutOfMemoryError:
                if self._at_once == 1:
                    raise
                self._at_once = max(1, len(some) // 2)
                torch.cuda.empty_cache()
        return torch.cat(found)

    def _batches(self, point: BatchDerivatives, kind: Kind, rows: Tensor) -> bool:
        """Does vmap work for this network? It fails, or is wrong, for some operations."""
        if kind not in self._batched:
            alone = torch.stack([self._product(point, kind, row) for row in rows])
            self._batched[kind] = False
            with contextlib.suppress(RuntimeError):
                together = self._product(point, kind, rows, many=True)
                off = float((together - alone).abs().max() / alone.abs().max().clamp(min=1e-30))
                self._batched[kind] = off < 1e-3
        return self._batched[kind]

    def _product(self, point: BatchDerivatives, kind: Kind, rows: Tensor, *, many: bool = False) -> Tensor:
        return _joined(point.product(kind, list(self.objective.split(rows).values()), many=many), many=many)


class BatchDerivatives:
    """One batch at the present weights: the logits, and the graphs for products."""

    def __init__(self, objective: Objective, batch: Batch) -> None:
        chosen = objective.stand_ins(grad=True)
        self._names, self._leaves = tuple(chosen), tuple(chosen.values())
        with objective.conditions():
            self.logits = objective.forward(chosen, batch)
            loss = objective.evaluate(self.logits, batch)
            self.loss = torch.tensor(loss, dtype=torch.float64, device=objective.device)
            if not self.logits.requires_grad:
                raise UseError(
                    f"the loss does not depend on {self._names[0]}, nor on any other parameter chosen"
                )
            known = objective.cross_entropy(self.logits, batch)
            with naming_culprit():
                self._score = score(objective.loss, self.logits, batch[1], known)

    @functools.cached_property
    def slope(self) -> tuple[Tensor, ...]:
        """The gradient `Jᵀ s`, with a graph in which s, the loss's derivative, depends on the weights."""
        return self._pulled(self._score)

    @functools.cached_property
    def _frozen(self) -> tuple[tuple[Tensor, ...], Tensor]:
        """`Jᵀ u` at u = s, and u. Its derivative by the weights along v is `S v`; by u it is `J v`."""
        seed = self._score.detach().requires_grad_()
        return self._pulled(seed), seed

    def product(self, kind: Kind, vectors: list[Tensor], *, many: bool = False) -> tuple[Tensor, ...]:
        """One product; with `many`, of vectors that are stacked along a first dimension."""
        with naming_culprit():
            if kind == "hessian":
                return self._back(self.slope, self._leaves, vectors, many)
            if kind == "residual":
                return self._back(self._frozen[0], self._leaves, vectors, many)
            pushed = self.pushed(vectors, many=many)
            if kind == "fisher":
                # n·sᵢ is the derivative of one example's loss by its logits, and Jᵢᵀ of it is its gradient.
                slope, num = self._score.detach(), len(self.logits)
                along = (slope * pushed).reshape(*pushed.shape[:many], num, -1).sum(-1)
                seeds = num * along.reshape(along.shape + (1,) * (slope.ndim - 1)) * slope
                return self._back((self.logits,), self._leaves, [seeds], many)
            (curved,) = self._back((self._score,), (self.logits,), [pushed], many)
            return self._back((self.logits,), self._leaves, [curved], many)

    def pushed(self, vectors: list[Tensor], *, many: bool = False) -> Tensor:
        """`J v`, of the shape of the logits."""
        pulled, seed = self._frozen
        (found,) = self._back(pulled, (seed,), vectors, many)
        return found

    def _pulled(self, seed: Tensor) -> tuple[Tensor, ...]:
        with torch.enable_grad(), naming_culprit(), watching_own_functions(self.logits):
            found = torch.autograd.grad(
                self.logits, self._leaves, seed, create_graph=True, allow_unused=True, retain_graph=True
            )
        return require_used(self._names, found)

    @staticmethod
    def _back(
        outputs: Sequence[Tensor], inputs: Sequence[Tensor], seeds: Sequence[Tensor], many: bool
    ) -> tuple[Tensor, ...]:
        """One backward pass; zero for inputs that nothing depends on."""
        reached = [index for index, output in enumerate(outputs) if output.requires_grad]
        found: Sequence[Tensor | None] = [None] * len(inputs)
        if reached:
            with without_batching_warnings() if many else contextlib.nullcontext():
                found = torch.autograd.grad(
                    [outputs[index] for index in reached],
                    inputs,
                    [seeds[index] for index in reached],
                    retain_graph=True,
                    allow_unused=True,
                    is_grads_batched=many,
                )
        lead = seeds[0].shape[:1] if many else ()
        return tuple(
            one if one is not None else into.new_zeros((*lead, *into.shape))
            for one, into in zip(found, inputs, strict=True)
        )


@contextlib.contextmanager
def without_batching_warnings() -> Iterator[None]:
    """Silence the warnings about operations that vmap runs one by one: slower, but correct."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*batching rule.*")
        yield


@contextlib.contextmanager
def naming_culprit() -> Iterator[None]:
    """Turn autograd's error about a missing second derivative into one that names the operation."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, NotImplementedError) as error:
        operation = re.search(r"derivative for '?(?:aten::)?(\w+)'? is not implemented", str(error))
        if operation is None:
            raise
        raise _no_second_derivative(operation[1]) from error


@contextlib.contextmanager
def watching_own_functions(output: Tensor) -> Iterator[None]:
    """Refuse an autograd.Function whose backward has no derivative: autograd would treat it as zero."""
    culprits: list[str] = []

    def watch(node: Any) -> Any:
        def look(inputs: Sequence[Tensor | None], outputs: Sequence[Tensor | None]) -> None:
            if any(one is not None and one.requires_grad for one in outputs) and any(
                one is not None and (not one.requires_grad or "Error" in type(one.grad_fn).__name__)
                for one in inputs
            ):
                culprits.append(type(node).__name__.removesuffix("Backward"))

        return node.register_hook(look)

    with contextlib.ExitStack() as stack:
        for node in own_functions(output):
            stack.callback(watch(node).remove)
        yield
    if culprits:
        raise _no_second_derivative(culprits[-1])


def _no_second_derivative(culprit: str) -> UseError:
    return UseError(
        f"{culprit} has no second derivative, so the loss has no Hessian by autograd. Exchange it for an "
        "operation that has one while you measure"
    )


def require_used(names: Iterable[str], gradients: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """Refuse parameters that the loss does not depend on."""
    for name, one in zip(names, gradients, strict=True):
        if one is None:
            raise UseError(
                f"the loss does not depend on {name}. Leave it out: freeze it with requires_grad_(False), or "
                "choose others where there is parameters=…"
            )
    return tuple(gradients)  # type: ignore[arg-type]


def _joined(tensors: Sequence[Tensor], *, many: bool = False) -> Tensor:
    """Tensors as one vector (P,); with `many`, stacked ones (k, *shape) as (k, P)."""
    return torch.cat([tensor.reshape(*tensor.shape[:many], -1) for tensor in tensors], dim=-1)
