"""The modules that end the branches of a candidate block, and the gradients that arrive there.

While the network runs, the output of such a module, which is zero, is a leaf of autograd's graph: the
backward pass brings the gradient g of the loss with respect to it, and goes no further into the candidate.
With the features φ that the module was given, this determines the gradient of its tensors.

A map `y = Zφ` has the gradient `M = E_i Σ_t g_t φ_tᵀ` with respect to Z, a gain `y = z∘u` has `E_i Σ_t
g_t∘u_t`, where g is the gradient of the loss of example i with respect to y. With `S = E[φφᵀ]`, `M (S +
ρI)⁻¹` is the step of least squares: of all with the same effect on the loss, the one that moves y least. Only
sums are kept, so memory does not grow with the number of examples.
"""

# B examples, P positions of an example, O outputs, F features, C channels

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from theodolite.probes.example_losses import HALVES
from theodolite.surgery import OutputTensor

CHUNK = 2**24
"""Numbers that the windows of a convolution may take at a time."""
WIDEST = 8192
"""Maps with more features than this keep only the diagonal of S."""

OutputTensors = Mapping[str, OutputTensor]
"""By name within the module that holds them."""
Directions = tuple[dict[str, Tensor], dict[str, Tensor]]
"""By output tensor: the mean gradient, and the preconditioned one."""


class _Site:
    """A module that ends a branch, with the sums of its gradient."""

    def __init__(self, module: nn.Module, tensors: OutputTensors, channel: int) -> None:
        self.module, self.tensors = module, tensors
        self.channel = channel
        """The dimension of the module's output that holds its channels."""
        self.example = 0
        """The dimension that holds the examples; each may have several indices of it."""
        self.positions = 0
        self.directions = torch.zeros(())

    def _named(self, *both: Mapping[str, Tensor]) -> Directions:
        plain, other = ({one.name: each[own] for own, one in self.tensors.items()} for each in both)
        return plain, other


class MapSite(_Site):
    """`y = Wφ + b`: a linear map, or a convolution, which is one of the windows of its input.

    >>> linear = nn.Linear(2, 1)
    >>> site = MapSite(linear, {"weight": OutputTensor("weight", 0.0, 0)})
    >>> site.add(torch.ones(2, 1), torch.tensor([[1.0, 2.0], [3.0, 0.0]]), examples=2)
    >>> site.moment().tolist(), site.settle(2, ridge=1e-9)[0]["weight"].tolist()
    ([[5.0, 1.0], [1.0, 2.0]], [[2.0, 1.0]])
    """

    def __init__(self, module: nn.Module, tensors: OutputTensors) -> None:
        self.convolves = isinstance(module, (nn.Conv1d, nn.Conv2d))
        super().__init__(module, tensors, 1 if self.convolves else -1)
        weight = module.weight
        assert isinstance(weight, Tensor)
        self.weight_shape, self.transposed = weight.shape, is_transposed(module)
        self.channels, self.features = (weight.T if self.transposed else weight.flatten(1)).shape
        self.shifts = torch.zeros(())
        self.dtype, self.device = wide(weight.dtype), weight.device
        self.clear()

    def clear(self) -> None:
        """Forget all examples."""
        square = (self.features, self.features) if self.features <= WIDEST else (self.features,)
        self.gradient = torch.zeros(self.channels, self.features, dtype=torch.float64, device=self.device)
        self.shift = torch.zeros(self.channels, dtype=torch.float64, device=self.device)
        self.square = torch.zeros(square, dtype=self.dtype, device=self.device)
        self.positions = 0

    def add(self, gradient: Tensor, features: Tensor, examples: int) -> None:
        """Add the gradient of some examples."""
        for _, gradient_BPO, features_BPF in self._rows(gradient, features, examples):
            rows, columns = gradient_BPO.flatten(0, 1), features_BPF.flatten(0, 1)
            self.positions += len(columns)
            self.gradient += product(rows.T, columns)
            self.shift += rows.sum(0, dtype=wide(rows.dtype))
            if self.square.ndim == 1:
                self.square += columns.to(self.square.dtype).square().sum(0)
            elif columns.dtype == self.square.dtype:
                self.square.addmm_(columns.T, columns)
            else:
                self.square += product(columns.T, columns)

    def moment(self) -> Tensor:
        """S, or its diagonal, in float64."""
        return self.square.double() / max(self.positions, 1)

    def settle(self, examples: int, ridge: float) -> Directions:
        """The mean gradient of all examples, and the preconditioned one."""
        mean, shift = self.gradient / examples, self.shift / examples
        both = (mean, shift), (self._preconditioned(mean, ridge), shift / (1 + ridge))
        self.directions = torch.cat([weight for weight, _ in both]).to(self.dtype).T.contiguous()
        self.shifts = torch.stack([bias for _, bias in both]).to(self.dtype) * ("bias" in self.tensors)
        del self.gradient, self.shift, self.square
        return self._named(*({"weight": self._shaped(weight), "bias": bias} for weight, bias in both))

    def judge(self, gradient: Tensor, features: Tensor, examples: int) -> Tensor:
        """For each example the inner products of its gradient with both, (B, 2)."""
        found = gradient.new_zeros(examples, 2, dtype=wide(gradient.dtype))
        for start, rows_BPO, columns_BPF in self._rows(gradient, features, examples):
            flat = columns_BPF.flatten(0, 1)
            # In half precision if the features are: a direction may be rounded, a sum may not.
            moved = product(flat, self.directions.to(flat.dtype) if flat.is_cuda else self.directions)
            moved_BP2O = moved.unflatten(0, rows_BPO.shape[:2]).unflatten(2, (2, -1)) + self.shifts
            found[start : start + len(rows_BPO)] = torch.einsum(
                "bpo,bpko->bk", rows_BPO.to(moved.dtype), moved_BP2O
            )
        return found

    def _preconditioned(self, mean: Tensor, ridge: float) -> Tensor:
        """`M (S + ρI)⁻¹`, ρ the ridge times the mean of S's diagonal."""
        moment = self.moment()
        diagonal = moment if moment.ndim == 1 else moment.diagonal()
        load = ridge * diagonal.mean()
        if not bool(load > 0):  # all features are zero
            return torch.zeros_like(mean)
        if moment.ndim == 1:
            return mean / (moment + load)
        diagonal += load  # a view of S
        factor, failed = torch.linalg.cholesky_ex(moment)
        if bool(failed):  # indefinite by rounding
            values, vectors = torch.linalg.eigh(moment)
            return mean @ (vectors / values.clamp(min=load)) @ vectors.T
        return torch.cholesky_solve(mean.T, factor).T.contiguous()

    def _rows(
        self, gradient: Tensor, features: Tensor, examples: int
    ) -> Iterator[tuple[int, Tensor, Tensor]]:
        rows = by_example(gradient, examples, self.example, self.channel)
        if not self.convolves:
            yield 0, rows, by_example(features, examples, self.example, -1)
            return
        each = max(1, CHUNK // (rows.shape[1] * self.weight_shape[1:].numel()))
        for start in range(0, examples, each):
            yield start, rows[start : start + each], windows(self.module, features[start : start + each])

    def _shaped(self, matrix: Tensor) -> Tensor:
        return matrix.T.contiguous() if self.transposed else matrix.reshape(self.weight_shape)


class GainSite(_Site):
    """`y = z∘u + s`: the gain z of a norm, or any vector that multiplies channels, and its shift."""

    def __init__(
        self, module: nn.Module, tensors: OutputTensors, gain: str, shift: str | None, channel: int
    ) -> None:
        super().__init__(module, tensors, channel)
        self.gain, self.shift = gain, shift
        self.channels, self.features = getattr(module, gain).numel(), 1
        self.clear()

    def clear(self) -> None:
        """Forget all examples."""
        device = getattr(self.module, self.gain).device
        self.sums = torch.zeros(3, self.channels, dtype=torch.float64, device=device)
        """Of the gradients of gain and shift, and of the squares of u."""
        self.positions = 0

    def add(self, gradient: Tensor, features: Tensor, examples: int) -> None:
        """Add the gradient of some examples."""
        rows, columns = self._rows(gradient, features, examples)
        self.positions += rows.shape[0] * rows.shape[1]
        self.sums += torch.stack([one.sum((0, 1)) for one in (rows * columns, rows, columns.square())])

    def settle(self, examples: int, ridge: float) -> Directions:
        """The mean gradient of all examples, and the preconditioned one."""
        gain, shift = self.sums[:2] / examples
        moment = self.sums[2] / max(self.positions, 1)
        load = ridge * moment.mean()
        scaled = gain / (moment + load) if bool(load > 0) else torch.zeros_like(gain)
        both = (gain, shift), (scaled, shift / (1 + ridge))
        self.directions = torch.stack(
            [torch.stack([one, other * (self.shift is not None)]) for one, other in both]
        )
        return self._named(*({self.gain: one, self.shift or "": other} for one, other in both))

    def judge(self, gradient: Tensor, features: Tensor, examples: int) -> Tensor:
        """For each example the inner products of its gradient with both, (B, 2)."""
        rows, columns = self._rows(gradient, features, examples)
        own = torch.stack([(rows * columns).sum(1), rows.sum(1)], 1).double()
        return torch.einsum("bsc,ksc->bk", own, self.directions)

    def _rows(self, gradient: Tensor, features: Tensor, examples: int) -> tuple[Tensor, Tensor]:
        dtype = wide(gradient.dtype)
        rows, columns = (
            by_example(one, examples, self.example, self.channel) for one in (gradient, features)
        )
        return rows.to(dtype), columns.to(dtype)


Site = MapSite | GainSite


class GradientSums:
    """Sums of the examples' gradients `v` with respect to a shift of the stream, and of `vvᵀ`, in float64.

    Examples whose gradient is zero need not be added.

    >>> sums = GradientSums(2)
    >>> sums.add(torch.tensor([[1.0, 2.0], [3.0, 0.0]]))
    >>> sums.mean(2).tolist(), sums.covariance(2).tolist()
    ([2.0, 1.0], [[2.0, -2.0], [-2.0, 2.0]])
    """

    def __init__(self, channels: int, device: torch.device | None = None) -> None:
        self.total = torch.zeros(channels, dtype=torch.float64, device=device)
        self.outer = torch.zeros(channels, channels, dtype=torch.float64, device=device)

    def add(self, gradients_BC: Tensor) -> None:
        """Add examples."""
        gradients = gradients_BC.double()
        self.total += gradients.sum(0)
        self.outer.addmm_(gradients.T, gradients)

    def mean(self, examples: int) -> Tensor:
        """v̄."""
        return self.total / examples

    def covariance(self, examples: int) -> Tensor:
        """Σ, unbiased."""
        return (self.outer - torch.outer(self.total, self.total) / examples) / (examples - 1)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums of a dtype are taken."""
    return torch.promote_types(dtype, torch.float32)


def product(a: Tensor, b: Tensor) -> Tensor:
    """The product of two matrices; sums of half-precision numbers are not rounded to half precision.

    >>> product(torch.ones(1, 300, dtype=torch.bfloat16), torch.ones(300, 1, dtype=torch.bfloat16))
    tensor([[300.]])
    """
    if a.is_cuda and a.dtype in HALVES and a.dtype == b.dtype:
        return torch.mm(a, b, out_dtype=torch.float32)
    dtype = wide(torch.promote_types(a.dtype, b.dtype))
    return a.to(dtype) @ b.to(dtype)


def by_example(tensor: Tensor, examples: int, example: int, channel: int) -> Tensor:
    """As (B, P, C).

    >>> by_example(torch.zeros(5, 2, 3), 2, example=1, channel=-1).shape  # positions first, then examples
    torch.Size([2, 5, 3])
    >>> by_example(torch.zeros(10, 3), 2, example=0, channel=-1).shape  # examples and positions in one
    torch.Size([2, 5, 3])
    """
    moved = tensor.movedim((example, channel), (0, -1))
    return moved.reshape(examples, -1, moved.shape[-1])


def windows(convolution: nn.Module, maps: Tensor) -> Tensor:
    """The windows of the input that a convolution maps to its outputs, (B, P, F).

    >>> convolution = nn.Conv2d(2, 3, 3, stride=2, padding=1, bias=False)
    >>> maps = torch.randn(1, 2, 5, 5)
    >>> found = windows(convolution, maps) @ convolution.weight.flatten(1).T
    >>> torch.allclose(found[0, :, 0], convolution(maps)[0, 0].flatten(), atol=1e-6)
    True
    """
    assert isinstance(convolution, (nn.Conv1d, nn.Conv2d))
    padded = F.pad(maps, convolution._reversed_padding_repeated_twice)
    kernel, dilation, stride = convolution.kernel_size, convolution.dilation, convolution.stride
    if isinstance(convolution, nn.Conv1d):
        padded, kernel, dilation, stride = padded[:, :, None], (1, *kernel), (1, *dilation), (1, *stride)
    return F.unfold(padded, kernel, dilation=dilation, stride=stride).transpose(1, 2)


def is_transposed(module: nn.Module) -> bool:
    """Is it GPT-2's Conv1D, a linear map with a weight (in, out)?"""
    return type(module).__name__ == "Conv1D" and type(module).__module__.startswith("transformers.")


def is_map(module: nn.Module) -> bool:
    """Is it a linear map or a convolution whose forward pass is torch's own?"""
    forward = type(module).forward
    if isinstance(module, (nn.Conv1d, nn.Conv2d)):
        plain = forward in (nn.Conv1d.forward, nn.Conv2d.forward)
        return plain and module.groups == 1 and module.padding_mode == "zeros"
    return is_transposed(module) or (isinstance(module, nn.Linear) and forward is nn.Linear.forward)
