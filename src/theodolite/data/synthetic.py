"""Data sets that are computed: a Gaussian mixture and modular addition."""

# N examples, D dimensions, K classes, P modulus

from __future__ import annotations

from functools import cache

import numpy as np
import torch

from theodolite.core.arguments import is_number, whole
from theodolite.core.errors import UseError
from theodolite.data.batches import Examples, generator


@cache
def mixture(
    num: int = 8192, *, classes: int = 10, dimensions: int = 32, separation: float = 4.0, seed: int = 0
) -> Examples:
    """One Gaussian of unit variance for each class, around orthogonal centres of length `separation`.

    The centres are a random rotation of the first K axes, the same for every `num` and `seed`, so another
    seed gives new examples of the same problem. The numbers of examples per class differ by at most one.

    >>> two = mixture(1000, classes=2, dimensions=8)
    >>> two.labels.bincount()
    tensor([500, 500])
    """
    if not 2 <= classes <= dimensions:
        raise UseError(f"classes is {classes} and dimensions {dimensions}: give 2 ≤ classes ≤ dimensions")
    gaussian_DD = generator("mixture centres", dimensions).standard_normal((dimensions, dimensions))
    basis_DD, _ = np.linalg.qr(gaussian_DD)
    rng = generator("mixture", classes, dimensions, seed)
    labels_N = rng.permutation(np.arange(num) % classes)
    values_ND = separation * basis_DD[labels_N] + rng.standard_normal((num, dimensions))
    return Examples("mixture", torch.from_numpy(values_ND).float(), torch.from_numpy(labels_N), classes)


def mixture_accuracy(classes: int = 10, separation: float = 4.0) -> float:
    """The accuracy of the best possible classifier of `mixture`, `∫ φ(t) Φ(t + separation)^(K−1) dt`.

    The best classifier picks the centre with the largest inner product, which is `separation + t` for the
    right class and standard normal for the K − 1 others. For two classes it is `Φ(separation/√2)`.

    >>> from scipy import special
    >>> round(mixture_accuracy(classes=2, separation=2.0), 6), round(float(special.ndtr(2**0.5)), 6)
    (0.92135, 0.92135)
    """
    from scipy import integrate, special  # takes a second to import

    def integrand(t: float) -> float:
        density = np.exp(-t * t / 2) / np.sqrt(2 * np.pi)
        return float(density * special.ndtr(t + separation) ** (classes - 1))

    return float(integrate.quad(integrand, -10, 10)[0])


@cache
def modular_addition(
    modulus: int = 59, *, fraction: float = 1.0, held_out: bool = False, seed: int = 0
) -> Examples:
    """All pairs (x, y) with the label `x + y mod P`; the input is the sum of two one-hot rows, `e_x + e_y`.

    (x, y) and (y, x) are the same input and stay together: a part has both or none of them.

    Args:
        modulus: P, usually an odd prime. There are P² examples of P(P + 1)/2 unordered pairs.
        fraction: the fraction of the unordered pairs for training, chosen at random.
        held_out: return the other pairs instead, on which grokking shows.
        seed: of the choice.

    >>> table = modular_addition(5)
    >>> table.values[1 * 5 + 1], table.labels[1 * 5 + 1]
    (tensor([0., 2., 0., 0., 0.]), tensor(2))
    >>> [len(modular_addition(5, fraction=0.8, held_out=part).labels) for part in (False, True)]
    [20, 5]

    References:
        On the mechanism and dynamics of modular addition: Fourier features, lottery ticket, and
        grokking, 2026.
    """
    whole("modulus", modulus, least=2)
    if not is_number(fraction) or not 0 < fraction <= 1:
        raise UseError(f"fraction is {fraction!r}: give a number above 0, at most 1")
    x_N, y_N = (axis.reshape(-1) for axis in torch.meshgrid(*[torch.arange(modulus)] * 2, indexing="ij"))
    num = modulus * (modulus + 1) // 2
    trained = round(fraction * num)
    if (num - trained if held_out else trained) == 0:
        part = "held out" if held_out else "trained on"
        raise UseError(
            f"modulus is {modulus} and fraction {fraction:g}: none of the {num} unordered pairs is {part}. "
            f"Give a {'smaller' if held_out else 'larger'} fraction"
        )
    smaller_N, larger_N = torch.minimum(x_N, y_N), torch.maximum(x_N, y_N)
    pair_N = larger_N * (larger_N + 1) // 2 + smaller_N
    order = torch.from_numpy(generator("modular addition", modulus, seed).permutation(num))
    in_part = torch.zeros(num, dtype=torch.bool)
    in_part[order[trained:] if held_out else order[:trained]] = True
    x_N, y_N = x_N[in_part[pair_N]], y_N[in_part[pair_N]]
    one_hot_PP = torch.eye(modulus)
    return Examples("modular-addition", one_hot_PP[x_N] + one_hot_PP[y_N], (x_N + y_N) % modulus, modulus)
