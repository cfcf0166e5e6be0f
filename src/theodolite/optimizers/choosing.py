"""Which optimizer carries out a rule, and what it calls its options."""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.optim import Optimizer

from theodolite.core.errors import UseError
from theodolite.optimizers.planned import Make


@dataclass(frozen=True)
class Choice:
    """One optimizer: where it is, and what the plan's numbers are called there."""

    home: str
    name: str
    eps: str | None = "eps"
    """The option that is the plan's eps; None if it has none."""
    extent: tuple[str, float | None] | None = None
    """The option in units of the weight, and its usual value."""
    axes: bool = False
    """Has it to be told which dimensions are inputs?"""
    rows: bool = False
    """Does it treat blocks of fused outputs apart?"""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Options without which it does not do what the rule is for."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Options that break the rule, and why."""

    shares: bool = False
    """Can replicas share its work out?"""


def _muon(scale: str) -> Choice:
    return Choice(
        "theodolite.optimizers.muon", "Muon", axes=True, rows=True, fixed={"scale": scale}, shares=True
    )


BORROWED = "theodolite.optimizers.borrowed"
DECOUPLED = {"weight_decouple": True, "fixed_decay": False}
NEGATED = {"maximize": "pytorch_optimizer negates the gradients in place; minimise the negative instead"}

CHOICES: dict[str, Choice] = {
    "adamw": Choice("torch.optim", "AdamW"),
    # Its decay is coupled: it adds weight_decay·W to the gradient. Without momentum that is the rule's
    # `W ← W − lr·(A + weight_decay·W)`; with momentum the decay is averaged as the gradient is.
    "sgd": Choice("torch.optim", "SGD", eps=None),
    "lion": Choice(BORROWED, "Lion", eps=None, fixed=DECOUPLED, refused=NEGATED),
    "sophia": Choice(BORROWED, "SophiaH", extent=("p", 0.01), fixed=DECOUPLED, refused=NEGATED),
    # Every dimension of a tensor gets a basis of its own, those of a kernel or of experts too, which changes
    # its update by a factor that no width changes.
    "soap": Choice(BORROWED, "SOAP", refused=NEGATED),
    "shampoo": Choice(
        BORROWED,
        "Shampoo",
        eps="matrix_eps",
        fixed=DECOUPLED,
        refused={**NEGATED, "momentum": "pytorch_optimizer averages raw gradients with preconditioned ones"},
    ),
    "diffgrad": Choice(BORROWED, "DiffGrad", fixed=DECOUPLED, refused=NEGATED),
    "schedule-free": Choice(BORROWED, "ScheduleFreeAdamW", refused=NEGATED),
    "muon": _muon("none"),
    "muon-original": _muon("original"),
    "muon-kimi": _muon("rms"),
    "muon-spectral": _muon("spectral"),
    # pytorch_optimizer's SpectralSphere computes in bfloat16, leaves out √(out/in) and never retracts.
    "sso": Choice("theodolite.optimizers.sphere", "SpectralSphere", axes=True, extent=("radius", None)),
}


def maker(rule: str, options: Mapping[str, Any], *, shared_over: Any = None) -> Make:
    """What makes the optimizer of a rule from its groups; replicas share the work out where it can be.

    >>> maker("sgd", {"momentun": 0.9})
    Traceback (most recent call last):
    theodolite.UseError: 'momentun' is no option of SGD. Did you mean 'momentum'?
    """
    choice = CHOICES[rule]
    optimizer = _load(rule, choice)
    known = set(inspect.signature(optimizer).parameters) - {"params", "kwargs"}
    planned = {"lr", "weight_decay", choice.eps, "axes", "rows", "shared_over", *choice.fixed}
    for option in options:
        if option in choice.refused:
            raise UseError(f"{option!r} cannot be used with {rule}: {choice.refused[option]}. Leave it out")
        if option in planned:
            raise UseError(f"{option!r} of {choice.name} is set by the plan. Leave it out of the options")
        if option not in known:
            near = difflib.get_close_matches(str(option), known, n=1)
            hint = f"Did you mean {near[0]!r}?" if near else f"It has {', '.join(sorted(known - planned))}"
            raise UseError(f"{option!r} is no option of {choice.name}. {hint}")
    shared = {"shared_over": shared_over} if choice.shares else {}
    return functools.partial(optimizer, **options, **choice.fixed, **shared)


def _load(rule: str, choice: Choice) -> type[Optimizer]:
    try:
        module = importlib.import_module(choice.home)
    except ModuleNotFoundError as error:
        if error.name != "pytorch_optimizer":
            raise
        raise UseError(
            f"{rule} comes from pytorch_optimizer, which is not installed: pip install 'theodolite[optim]'"
        ) from None
    found: type[Optimizer] = getattr(module, choice.name)
    return found
