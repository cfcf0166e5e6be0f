"""Orthogonal factors UVᵀ of many matrices, by matrix products alone.

With the singular value decomposition `X = UΣVᵀ`, an odd polynomial of a matrix is one of its singular
values: `aX + b(XXᵀ)X + c(XXᵀ)²X = U(aΣ + bΣ³ + cΣ⁵)Vᵀ`. Polynomials that push (0, 1] towards 1 give UVᵀ.

A product of small matrices leaves an accelerator idle, and launching one costs the same for all sizes. So all
matrices of one shape go through Newton–Schulz as one batch, as many as a bound on memory allows. Where
launching kernels dominates, a GPU records them once as a CUDA graph and replays it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

JORDAN = (3.4445, -4.7750, 2.0315)
"""Steepest at zero; singular values end up between 0.7 and 1.2."""

POLAR_EXPRESS = (
    (8.2051, -22.9019, 16.4607),
    (4.0664, -2.8612, 0.5184),
    (3.9096, -2.8234, 0.5250),
    (3.2856, -2.4153, 0.4853),
    (2.2779, -1.6198, 0.3985),
    (1.8726, -1.2307, 0.3585),
    (1.8564, -1.2132, 0.3568),
    (1.8750, -1.2500, 0.3750),
    (1.8750, -1.2500, 0.3750),
    (1.8750, -1.2500, 0.3750),
)
"""Each is the best polynomial for the range the ones before leave; the last one converges."""

SHORT = 128
"""Matrices with a shorter side are computed in float32 on the CPU."""
COPIED = 2**24
"""A stack of at least as many entries takes longer to copy than a kernel to launch."""


def newton_schulz(matrices: Tensor, *, steps: int, eps: float | Tensor) -> Tensor:
    """Muon's `UVᵀ`, roughly: Jordan's quintic, after a division by the Frobenius norm plus eps.

    Args:
        matrices: (…, m, n), of any dtype.
        steps: number of iterations.
        eps: in units of the matrices; or one for each matrix, (…, 1, 1).

    >>> flat = newton_schulz(torch.diag(torch.tensor([4.0, 2.0, 1.0])), steps=5, eps=1e-7)
    >>> bool((flat.diagonal() - 1).abs().max() < 0.35), flat[0, 1].item()
    (True, 0.0)

    References:
        Jordan et al., Muon: an optimizer for hidden layers in neural networks, 2024.
    """
    dtype = computing_dtype(matrices.dtype, matrices.device, matrices.shape)
    return _iterate(normalised(matrices.to(dtype), eps), [JORDAN] * steps)


def normalised(matrices: Tensor, eps: float | Tensor) -> Tensor:
    """`X/(‖X‖_F + eps)` for entries of any size; 0 for zero.

    Entries are first scaled by a power of two, which is exact: squares of 10²⁵ overflow float32, and those of
    10⁻²⁵ underflow it.
    """
    wide = torch.promote_types(matrices.dtype, torch.float32)
    # Not the norm of order ∞, which takes ten times as long on a CPU.
    low, high = torch.aminmax(matrices.flatten(-2), dim=-1, keepdim=True)
    largest = torch.maximum(-low, high)[..., None].to(wide)
    # Not beyond 2^±126: neither the factor nor its inverse may leave the normal numbers of float32.
    exponent = torch.frexp(largest).exponent.clamp(-126, 126)
    # By its bits: on a GPU torch compiles exp2 at its first use, and warns if it cannot cache it.
    factor = (127 - exponent).bitwise_left_shift(23).view(torch.float32).to(wide)
    scaled = matrices * factor.to(matrices.dtype)
    norm = torch.linalg.vector_norm(scaled, dim=(-2, -1), keepdim=True) + eps * factor
    return scaled.div_(norm.clamp_min(torch.finfo(wide).tiny).to(matrices.dtype))


def polar(matrices: Tensor) -> Tensor:
    """`UVᵀ`, to about 1e-4 where singular values are above 1e-3 of the Frobenius norm; 0 for zero.

    Args:
        matrices: (…, m, n), of float32 or float64, in which it computes.

    References:
        Amsel et al., The Polar Express: optimal matrix sign methods, 2025.
    """
    norm = torch.linalg.vector_norm(matrices, dim=(-2, -1), keepdim=True)
    # A hair more than the norm, so that rounding leaves no singular value above 1.
    x = matrices / (norm * 1.01).clamp_min(torch.finfo(matrices.dtype).tiny)
    return _iterate(x, POLAR_EXPRESS)


def computing_dtype(dtype: torch.dtype, device: torch.device, shape: Sequence[int]) -> torch.dtype:
    """bfloat16 where products of it are faster, float32 elsewhere, and float64 for float64.

    Products are faster on accelerators, and on CPUs with instructions for bfloat16 unless a side is short.
    """
    if dtype == torch.float64:
        return torch.float64
    if device.type != "cpu":
        return torch.bfloat16
    return torch.bfloat16 if min(shape[-2:]) >= SHORT and _multiplies_bfloat16() else torch.float32


@functools.cache
def _multiplies_bfloat16() -> bool:
    """Has this CPU instructions for it? Without them bfloat16 is several times slower than float32."""
    asked = (
        getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    )
    return any(ask is not None and bool(ask()) for ask in asked)


def _iterate(x: Tensor, coefficients: Iterable[tuple[float, float, float]]) -> Tensor:
    shape = x.shape
    x = x.reshape(-1, *shape[-2:])
    alone = len(x) == 1  # products of two matrices take less on the CPU than those of two stacks of one
    x = x[0] if alone else x
    add = torch.addmm if alone else torch.baddbmm
    # XXᵀ or XᵀX, the smaller of them: both give the same.
    tall = shape[-2] > shape[-1]
    for a, b, c in coefficients:
        gram = x.mT @ x if tall else x @ x.mT
        power = add(gram, gram, gram, beta=b, alpha=c)
        if x.dtype == torch.bfloat16 and x.numel() >= COPIED:
            # a·I added to the matrix saves a copy of X, and rounds no more than bfloat16 does elsewhere.
            power.diagonal(dim1=-2, dim2=-1).add_(a)
            x = x @ power if tall else power @ x
        else:
            x = add(x, x, power, beta=a) if tall else add(x, power, x, beta=a)
    return x.reshape(shape)


AT_ONCE, AT_ONCE_ON_CPU = 2**27, 2**19
"""Largest number of entries in a batch."""
ALONE_ON_CPU = 2**16
"""A batch of larger matrices gains nothing on the CPU."""
LARGE = 2**22
"""For matrices with at least as many entries, memory traffic costs an accelerator more than launches."""
RECORDED = 2**24
"""Largest number of entries in a batch that a GPU records: it keeps the memory of what is recorded."""


@dataclass(frozen=True)
class Matrices:
    """The matrices of one tensor, or of a block of its rows, and how they are orthogonalised."""

    count: int
    """1, or the number of experts."""
    shape: tuple[int, int]
    """out, in"""
    dtype: torch.dtype
    device: torch.device
    steps: int
    eps: float

    @property
    def numel(self) -> int:
        """Entries of all matrices."""
        return self.count * math.prod(self.shape)

    @property
    def is_large(self) -> bool:
        """Is a kernel for each matrix worth its launch?"""
        return self.device.type != "cpu" and math.prod(self.shape) >= LARGE

    @property
    def cost(self) -> float:
        """Number of multiplications."""
        short, long = sorted(self.shape)
        return self.count * self.steps * float(2 * short * short * long + short**3)


def batches(matrices: Sequence[Matrices]) -> Iterator[list[int]]:
    """Indices of what goes through Newton–Schulz together: of one shape, as many as fit."""
    alike: dict[tuple[object, ...], list[int]] = {}
    for place, one in enumerate(matrices):
        alike.setdefault((one.shape, one.dtype, one.device, one.steps, one.eps), []).append(place)
    for places in alike.values():
        first = matrices[places[0]]
        alone = math.prod(first.shape) > ALONE_ON_CPU
        room = AT_ONCE if first.device.type != "cpu" else 0 if alone else AT_ONCE_ON_CPU
        batch: list[int] = []
        filled = 0
        for place in places:
            if batch and filled + matrices[place].numel > room:
                yield batch
                batch, filled = [], 0
            batch.append(place)
            filled += matrices[place].numel
        yield batch


class NewtonSchulzBatch:
    """Newton–Schulz of the matrices of a batch, at every step of training.

    >>> one = Matrices(2, (3, 2), torch.float64, torch.device("cpu"), steps=5, eps=1e-7)
    >>> made = NewtonSchulzBatch([one])(lambda slots: [slot.copy_(torch.eye(3, 2)) for slot in slots])
    >>> made.shape, bool((made[0] - torch.eye(3, 2)).abs().max() < 0.35)
    (torch.Size([2, 3, 2]), True)
    """

    def __init__(self, matrices: Sequence[Matrices]) -> None:
        self.first = matrices[0]
        self.shape = (sum(one.count for one in matrices), *self.first.shape)
        self.dtype = computing_dtype(self.first.dtype, self.first.device, self.first.shape)
        self._iterated = functools.partial(newton_schulz, steps=self.first.steps, eps=self.first.eps)
        self._calls = 0
        self._recording: _Recording | None = None
        self._is_recorded = self.first.device.type == "cuda" and math.prod(self.shape) <= RECORDED

    def __call__(self, fill: Callable[[list[Tensor]], None]) -> Tensor:
        """(all matrices, out, in), in the dtype of the computation. A recorded result is valid until the next
        call. The first call runs eagerly, the second is recorded.

        Args:
            fill: writes the matrices into slots of (out, in).
        """
        self._calls += 1
        if self._is_recorded and self._calls > 1 and not torch.cuda.is_current_stream_capturing():
            if self._recording is None:
                self._recording = _Recording(self._empty(), self._iterated)
            fill(self._recording.slots)
            return self._recording.play()
        stack = self._empty()
        fill(list(stack.unbind()))
        return self._iterated(stack)

    def _empty(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=self.first.device)


class _Recording:
    """A function of one tensor as a CUDA graph."""

    def __init__(self, given: Tensor, function: Callable[[Tensor], Tensor]) -> None:
        self.slots = list(given.unbind())
        self._device = given.device
        self._graph = torch.cuda.CUDAGraph()
        # Other threads, such as a data loader, may use the GPU meanwhile.
        with (
            torch.cuda.device(given.device),
            torch.cuda.graph(self._graph, capture_error_mode="thread_local"),
        ):
            self._made = function(given)

    def play(self) -> Tensor:
        with torch.cuda.device(self._device):  # on the stream that has filled the slots
            self._graph.replay()
        return self._made
