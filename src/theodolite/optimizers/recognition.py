"""Which rule fits an optimizer that somebody else made: by its class, its base classes and its options.

A rule needs the size of a step for a gradient of any size, so what matters is how an update is normalised:

    adamw       entries of about one: Adam and its relatives, with the eps that each of them has
    sgd         the gradient itself, or averages of it
    lion        signs
    muon, …     an orthogonal matrix times a factor of its shape, which an option of the group names

An optimizer whose steps follow something else, such as the norm of the weight (LARS, LAMB, Adafactor with
`scale_parameter`), a distance that it learns (Prodigy, D-Adaptation) or a power of the gradient (MADGRAD),
has none of these rules.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from theodolite.optimizers.borrowed import Borrowed
from theodolite.optimizers.muon import SCALES
from theodolite.optimizers.parameter_groups import layers
from theodolite.optimizers.spec import find_optimizers

ENTRIES_OF_ONE = {
    *("Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Adagrad", "SparseAdam"),  # torch
    *("AdamC", "AdamP", "AdamS", "AdaBelief", "AdaMax", "AdaNorm", "AdEMAMix", "ADOPT"),  # pytorch_optimizer
    *("Adan", "Ano", "EXAdam", "FlashAdamW", "Grams", "GrokFastAdamW", "LaProp", "QHAdam"),
    *("StableAdamW", "Yogi"),
}
GRADIENTS = {"SGD", "ASGD", "SGDW", "SGDP", "AccSGD", "AggMo", "QHM"}
SIGNS = {"Lion", "SignSGD", "Tiger"}
BY_NAME = {
    **dict.fromkeys(ENTRIES_OF_ONE, "adamw"),
    **dict.fromkeys(GRADIENTS, "sgd"),
    **dict.fromkeys(SIGNS, "lion"),
    "DiffGrad": "diffgrad",
    "SOAP": "soap",
    "AdamWScheduleFree": "schedule-free",  # of the authors
}
"""Rules by the name of a class, wherever it is from: implementations of these agree."""
OWN_SCALE = {"TRAC"}
"""Wrappers that change the size of a step."""
ADJUSTED = {
    "adjust_lr_fn": {None: "muon-original", "original": "muon-original", "match_rms_adamw": "muon-kimi"},
    "adjust_lr": {None: "muon", "spectral_norm": "muon-spectral", "rms_norm": "muon-kimi"},
}
"""Options of Muon that choose the factor of a shape, those of torch and dion: the rule of each value."""
SCALED = {"none": "muon", "original": "muon-original", "rms": "muon-kimi", "spectral": "muon-spectral"}
"""The rule of each value of `scale`, the option of this library's Muon."""
MUONS = {
    *("Muon", "MuonClip", "DistributedMuon", "SingleDeviceMuon", "NorMuon", "AdaMuon"),
    *("MuonWithAuxAdam", "SingleDeviceMuonWithAuxAdam"),
}
"""Classes of orthogonal updates; those of NorMuon and AdaMuon are normalised to the same norm afterwards."""
JORDANS = {"lr", "weight_decay", "momentum"}
"""The options of Jordan's own Muon."""
_VARIANT = re.compile(r"^(?:DeepSpeed|CPU|Fused|Paged)+|_?(?:4bit|8bit|32bit|Fp8)$")
"""What a class of the same steps adds to the name."""


def rule_of(optimizer: Any, group: Mapping[str, Any]) -> str | None:
    """The name in `theodolite.optimizers.OPTIMIZERS` of the rule that fits a group; None if none does.

    >>> import torch
    >>> weights = [torch.ones(2, 2)]
    >>> for made in (torch.optim.RMSprop(weights), torch.optim.Muon(weights), torch.optim.Adadelta(weights)):
    ...     print(rule_of(made, made.param_groups[0]))
    adamw
    muon-original
    None
    """
    found = layers(optimizer, group)
    if any(type(one).__name__ in OWN_SCALE for one in found):
        return None
    kind = type(found[-1])
    for one in kind.__mro__:
        name = _VARIANT.sub("", one.__name__)
        for known in (_of_this_library(one, group), BY_NAME.get(name)):
            if known is not None:
                return known
        if name in MUONS:
            return _of_muon(group)
        if name in ("Adafactor", "AdaFactor"):
            return None if group.get("scale_parameter", True) else "adamw"
    return None


def reads_stored_shape(rule: str | None, group: Mapping[str, Any]) -> bool:
    """Is the factor of a shape that of the stored tensor, whichever of its dimensions holds the inputs?

    Those of other libraries take all tensors for (out, in), and so does this library's Muon without `axes`.
    An embedding is stored as (in, out).
    """
    spec = find_optimizers().get(rule or "")
    return spec is not None and spec.fixed.get("scale") in SCALES and group.get("axes") is None


def rule_of_vectors(rule: str | None, group: Mapping[str, Any]) -> str | None:
    """The rule of a group's vectors, given that of its matrices: SOAP steps vectors as Adam does.

    >>> [rule_of_vectors("soap", group) for group in ({}, {"precondition_1d": True})]
    ['adamw', 'soap']
    """
    return "adamw" if rule == "soap" and not group.get("precondition_1d", False) else rule


def eps_of(rule: str | None, group: Mapping[str, Any]) -> float | None:
    """The eps of a group; None if its optimizer has none, or several."""
    spec = find_optimizers().get(rule or "")
    names = [spec.eps.option] if spec is not None and spec.eps is not None else []
    for option in (*names, "eps", "epsilon"):
        if isinstance(value := group.get(option), int | float):
            return float(value)
    return None


def _of_this_library(kind: type, group: Mapping[str, Any]) -> str | None:
    """By the records there are: a class that is one of theirs, or that pytorch_optimizer has for one."""
    if kind.__name__ == "Muon" and "scale" in group:
        return SCALED.get(group["scale"])
    for name, spec in find_optimizers().items():
        given = spec.implementation
        if kind is given:
            return name
        if isinstance(given, Borrowed) and kind.__name__ == given.name:
            package = kind.__module__.partition(".")[0]
            if package in ("pytorch_optimizer", "theodolite"):
                return name
    return None


def _of_muon(group: Mapping[str, Any]) -> str | None:
    """Which Muon it is: several libraries have one, and they differ in the factor of a shape."""
    if group.get("algorithm", "muon") not in ("muon", "normuon"):  # dion trains vectors in the same object
        return group["algorithm"] if group["algorithm"] in ("adamw", "lion") else None
    if not group.get("use_muon", True):
        return "adamw"
    if group.get("update_scale") == "match_rms":  # NorMuon of pytorch_optimizer
        return "muon-kimi"
    for option, rules in ADJUSTED.items():
        if option in group:
            return rules.get(group[option])
    if "use_muon" in group:  # pytorch_optimizer, DeepSpeed, Jordan's
        return "muon-kimi" if group.get("use_adjusted_lr") else "muon-original"
    options = {key for key in group if key not in ("params", "param_names", "name", "initial_lr")}
    return "muon-original" if options <= JORDANS else None
