"""Weight-decay policies: which tensors decay, and how decay scales with size.

    paper        λ per role, such that λ‖W‖ stays comparable to the update; lr·λ follows the base lr
    independent  every tensor loses the fraction `weight_decay` of itself per step, whatever its learning rate
    none         nothing decays
    matrices     λ as `paper`, but no gain and no bias decays: the usual rule "no decay on vectors"
    everything   λ as `paper`, and every tensor decays, all gains too

Under the first two, weights, biases and the gains of Input-Norms decay. Only linear maps read such a gain,
and it would drift without decay. The gain of an Output-Norm, which reaches the residual stream, a softmax or
another nonlinearity, does not decay, nor does a gain without a norm. The last two policies are what most
training code does.

A vector that multiplies a weight decays like the gain of an Input-Norm. If it is a magnitude times a
direction, only the magnitude decays: a direction is divided by its own norm, so decay would change only the
size of its steps.

Logarithms of rates, such as `A_log` and the bias of the time step in a state-space model, do not decay under
the first two policies: decay would pull the rate to its value at zero. Parameters that the network marks by
`_no_weight_decay`, or that the caller names by `no_decay`, decay under no policy.
"""

from __future__ import annotations

from typing import Literal, get_args

from theodolite.anatomy.part import Part
from theodolite.core.errors import UseError
from theodolite.optimizers.condition import Hyper

Policy = Literal["paper", "independent", "none", "matrices", "everything"]
POLICIES: tuple[str, ...] = get_args(Policy)


def decays(part: Part, policy: Policy = "paper") -> bool:
    """Does this tensor decay under a policy?

    >>> gain = Part("g", (8,), "norm", "gain", 1, 8, False, True, (), (0,), norm="input")
    >>> [policy for policy in POLICIES if decays(gain, policy)]
    ['paper', 'independent', 'everything']
    """
    if policy not in POLICIES:
        raise UseError(f"the decay policy is {policy!r}: it is one of {', '.join(POLICIES)}")
    if not part.trained or part.undecayed:
        return False
    if policy in ("none", "everything"):
        return policy == "everything"
    if policy == "matrices":
        return part.role not in ("gain", "bias")
    return not part.rate and (part.role != "gain" or (part.norm == "input" and not part.scale_free))


def decayed(policy: Policy, part: Part, hyper: Hyper, weight_decay: float) -> float:
    """The tensor's weight decay under a policy, from the rule's in `hyper` and the base value.

    A rule that gives 0 is for an optimizer without weight decay.

    >>> matrix = Part("w", (8, 8), "linear", "hidden", 8, 8, True, True, (1,), (0,))
    >>> hyper = Hyper(1.0, std=1.0, lr=0.5, weight_decay=0.8, eps=1e-8)
    >>> decayed("paper", matrix, hyper, 0.1), decayed("independent", matrix, hyper, 0.1)
    (0.8, 0.2)
    """
    if not decays(part, policy) or not hyper.weight_decay:
        return 0.0
    return weight_decay / hyper.lr if policy == "independent" else hyper.weight_decay


def kind_of(part: Part) -> str:
    """The kind of a tensor, for weight decay.

    >>> from dataclasses import replace
    >>> gain = Part("g", (8,), "norm", "gain", 1, 8, False, True, (), (0,), norm="input")
    >>> kind_of(gain), kind_of(replace(gain, offset=1.0)), kind_of(replace(gain, op="scale"))
    ('Input-Norm gain', 'zero-centred Input-Norm gain', 'scale vector')
    """
    if part.role == "unused":
        return "unused"
    if part.kind == "gain":
        return f"zero-centred {gain_kind(part)}" if part.offset else gain_kind(part)
    if part.kind == "bias":
        return "bias"
    if "table" in part.uses:
        return "tied table" if "weight" in part.uses else "table"
    return "weight"


def gain_kind(part: Part) -> str:
    """The kind of a gain, zero-centred or not."""
    if part.scale_free:
        return "direction"
    if part.norm and part.op != "norm":
        return "scale vector"
    return {"input": "Input-Norm gain", "output": "Output-Norm gain", None: "scale"}[part.norm]
