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

from theodolite.errors import UseError
from theodolite.optim.planned import Make


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
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Options without which it does not do what the rule is for."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Options that break the rule, and why."""


DECOUPLED = {"weight_decouple": True, "fixed_decay": False}

CHOICES: dict[str, Choice] = {
    "adamw": Choice("torch.optim", "AdamW"),
    # Its decay is coupled: it adds weight_decay·W to the gradient. Without momentum that is the rule's
    # `W ← W − lr·(A + weight_decay·W)`; with momentum the decay is averaged as the gradient is.
    "sgd": Choice("torch.optim", "SGD", eps=None),
    "lion": Choice("pytorch_optimizer", "Lion", eps=None, fixed=DECOUPLED),
    "sophia": Choice("pytorch_optimizer", "SophiaH", extent=("p", 0.01), fixed=DECOUPLED),
    # The first step only fills the preconditioner. Every dimension of a tensor gets a basis of its own, those
    # of a kernel or of experts too, which changes its update by a factor that no width changes.
    "soap": Choice("pytorch_optimizer", "SOAP"),
    "shampoo": Choice(
        "pytorch_optimizer",
        "Shampoo",
        eps="matrix_eps",
        fixed=DECOUPLED,
        refused={"momentum": "pytorch_optimizer averages raw gradients with preconditioned ones"},
    ),
    "muon": Choice("theodolite.optim.muon", "Muon", axes=True, fixed={"scale": "none"}),
    "muon-original": Choice("theodolite.optim.muon", "Muon", axes=True, fixed={"scale": "original"}),
    "muon-kimi": Choice("theodolite.optim.muon", "Muon", axes=True, fixed={"scale": "rms"}),
    "muon-spectral": Choice("theodolite.optim.muon", "Muon", axes=True, fixed={"scale": "spectral"}),
    # pytorch_optimizer's SpectralSphere computes in bfloat16, leaves out √(out/in) and never retracts.
    "sso": Choice("theodolite.optim.sphere", "SpectralSphere", axes=True, extent=("radius", None)),
}


def maker(rule: str, options: Mapping[str, Any]) -> Make:
    """What makes the optimizer of a rule from its groups.

    >>> maker("sgd", {"momentun": 0.9})
    Traceback (most recent call last):
    theodolite.errors.UseError: 'momentun' is no option of SGD. Did you mean 'momentum'?
    """
    choice = CHOICES[rule]
    optimizer = _load(rule, choice)
    known = set(inspect.signature(optimizer).parameters) - {"params", "kwargs"}
    planned = {"lr", "weight_decay", choice.eps, "axes", *choice.fixed}
    for option in options:
        if option in choice.refused:
            raise UseError(f"{option!r} cannot be used with {rule}: {choice.refused[option]}. Leave it out")
        if option in planned:
            raise UseError(f"{option!r} of {choice.name} is set by the plan. Leave it out of the options")
        if option not in known:
            near = difflib.get_close_matches(str(option), known, n=1)
            hint = f"Did you mean {near[0]!r}?" if near else f"It has {', '.join(sorted(known - planned))}"
            raise UseError(f"{option!r} is no option of {choice.name}. {hint}")
    return functools.partial(optimizer, **options, **choice.fixed)


def _load(rule: str, choice: Choice) -> type[Optimizer]:
    try:
        module = importlib.import_module(choice.home)
    except ModuleNotFoundError as error:
        if error.name != choice.home:
            raise
        raise UseError(
            f"{rule} comes from {choice.home}, which is not installed: pip install 'theodolite[optim]'"
        ) from None
    found: type[Optimizer] = getattr(module, choice.name)
    return found
