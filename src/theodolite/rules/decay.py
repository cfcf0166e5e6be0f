"""Weight decay as a policy: what decays, and how fast at another size.

    paper        λ per role, such that λ‖W‖ stays comparable to the update; lr·λ follows the base lr
    independent  every tensor loses the fraction `weight_decay` of itself per step, whatever its learning rate
    none         nothing decays

Under the first two, weights and biases decay, and the gain of an Input-Norm, which only linear maps read and
which would drift without it. The gain of an Output-Norm, which reaches the residual stream, a softmax or
another nonlinearity, never does, nor does any gain that no norm owns.
"""

from __future__ import annotations

from typing import Literal, get_args

from theodolite.anatomy.part import Part
from theodolite.errors import UseError
from theodolite.rules.hyper import Hyper

Policy = Literal["paper", "independent", "none"]
POLICIES: tuple[str, ...] = get_args(Policy)


def decays(part: Part) -> bool:
    """May this tensor decay at all?"""
    return part.role != "gain" or part.norm == "input"


def decayed(policy: Policy, part: Part, hyper: Hyper, weight_decay: float) -> float:
    """The tensor's weight decay under a policy, from the paper's in `hyper` and the base value.

    >>> matrix = Part("w", (8, 8), "linear", "hidden", 8, 8, True, True, (1,), (0,))
    >>> hyper = Hyper(1.0, std=1.0, lr=0.5, weight_decay=0.8, eps=1e-8)
    >>> decayed("paper", matrix, hyper, 0.1), decayed("independent", matrix, hyper, 0.1)
    (0.8, 0.2)
    """
    if policy not in POLICIES:
        raise UseError(f"the decay policy is {policy!r}: it is one of {', '.join(POLICIES)}")
    if policy == "none" or not decays(part):
        return 0.0
    return weight_decay / hyper.lr if policy == "independent" else hyper.weight_decay
