"""The one multiplier that cannot be absorbed: on the readout of a tied embedding.

One tensor is the table that tokens are looked up in and the weight of the readout. As a table it must start
and move by Θ(1) at every width, as a readout by 1/width. It follows the rule of the table, and the input of
the readout is multiplied by `1/r`, r the ratio of widths, with a hook. Where the network's own forward pass
multiplies the readout by numbers that change with size, these count; and what the tensor absorbs for such
numbers behind the table, the readout takes back.

A hook is not part of the weights. A network with multipliers therefore marks what is saved of it: the
metadata of `state_dict`, which `torch.save` keeps, and the config of a Hugging Face model, which
`save_pretrained` writes.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from theodolite.anatomy import Anatomy
from theodolite.anatomy.names import canonical_modules
from theodolite.anatomy.part import Part
from theodolite.core.arguments import is_number
from theodolite.core.errors import UseError

MARK = "theodolite"
"""The key in a Hugging Face config, and in the metadata of a safetensors file."""
METADATA = "theodolite_multiplier"
"""The key in a module's part of the metadata of `state_dict`."""


def readout_multipliers(
    target: Anatomy, partners: Mapping[str, Part]
) -> tuple[dict[str, float], dict[str, float]]:
    """The multipliers of tied readouts: by the name of the module, and by the name of the tensor."""
    by_module: dict[str, float] = {}
    by_tensor: dict[str, float] = {}
    for part in target.trained:
        partner = partners[part.name]
        table, readout = part.factor / partner.factor, part.readout_factor / partner.readout_factor
        multiplier = partner.fan_out / part.fan_out * table / readout
        if not part.readout or math.isclose(multiplier, 1):
            continue
        for name in part.readout:
            module = name.rpartition(".")[0]
            if not module or _does_more(target, module, part):
                raise UseError(
                    f"{part.name} is both the table that is looked up in and the weight of a readout that "
                    f"has no module of its own, so the readout's multiplier {multiplier:.4g} has no place. "
                    "Read out by a module that shares the weight: "
                    "head = nn.Linear(width, vocab, bias=False) and head.weight = embed.weight; or untie them"
                )
            by_module[module] = multiplier
        by_tensor[part.name] = multiplier
    return by_module, by_tensor


def _does_more(target: Anatomy, module: str, readout: Part) -> bool:
    """Does a module hold anything but the readout's weight and bias?"""
    prefix = f"{module}." if module else ""
    return any(
        name.startswith(prefix)
        for part in target.values()
        if part is not readout and part.role != "bias"
        for name in (part.name, *part.tied)
    )


@dataclass(frozen=True)
class Multiplier:
    """A forward pre-hook that multiplies the first tensor a module is called with."""

    factor: float

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with the first tensor scaled."""
        for position, value in enumerate(args):
            if isinstance(value, Tensor):
                return (*args[:position], value * self.factor, *args[position + 1 :]), kwargs
        for name, value in kwargs.items():
            if isinstance(value, Tensor):
                return args, kwargs | {name: value * self.factor}
        return args, kwargs


def attached(model: nn.Module) -> dict[str, float]:
    """The multipliers on a network, by the canonical names of modules."""
    return {
        name: hook.factor
        for name, module in canonical_modules(model)
        for hook in module._forward_pre_hooks.values()
        if isinstance(hook, Multiplier)
    }


def attach_multipliers(model: nn.Module, multipliers: Mapping[str, float], of: str = "the plan") -> None:
    """Multiply the inputs of modules, instead of by any earlier multipliers, and mark what is saved.

    `of` says whose multipliers they are, for the error if there is no such module.
    """
    modules = dict(canonical_modules(model))
    for name, factor in multipliers.items():
        if name not in modules:
            raise UseError(
                f"{of} multiplies the input of {name} by {factor:.4g}, but this {type(model).__name__} has "
                f"no module {name}. Plan for this network, or build the network at the plan's size"
            )
    detach_multipliers(model)
    if multipliers:
        _let_compiled_code_see_hooks()
    for name, factor in multipliers.items():
        module = modules[name]
        if name in attached(model):  # one module under two names
            continue
        module.register_forward_pre_hook(Multiplier(factor), with_kwargs=True)
        module.register_state_dict_post_hook(partial(_note, factor))
        module.register_load_state_dict_pre_hook(partial(_compare, factor))
        config, prefix = next(_configs(modules, name), (None, ""))
        if config is not None:
            known = getattr(config, MARK, {}).get("multipliers", {})
            setattr(config, MARK, {"multipliers": {**known, name.removeprefix(prefix): factor}})


def detach_multipliers(model: nn.Module) -> None:
    """Remove all multipliers and their marks from a network."""
    modules = dict(canonical_modules(model))
    for name, module in modules.items():
        for key, hook in list(module._forward_pre_hooks.items()):
            if isinstance(hook, Multiplier):
                del module._forward_pre_hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)
        for hooks in (module._state_dict_hooks, module._load_state_dict_pre_hooks):
            for key, hook in list(hooks.items()):
                if getattr(getattr(hook, "hook", hook), "func", None) in (_note, _compare):
                    del hooks[key]
        for config, _ in _configs(modules, name):
            if hasattr(config, MARK):
                delattr(config, MARK)


def missing(model: nn.Module) -> dict[str, float]:
    """Multipliers that the network's Hugging Face config names but the network does not have."""
    modules, there = dict(canonical_modules(model)), attached(model)
    outermost: dict[int, tuple[Any, str]] = {}  # models inside another share its config
    for name in modules:
        for config, prefix in _configs(modules, name):
            outermost.setdefault(id(config), (config, prefix))
    found = {
        f"{prefix}{module}": factor
        for config, prefix in outermost.values()
        for module, factor in checked(getattr(config, MARK, {}), "the config").items()
    }
    return {name: factor for name, factor in found.items() if name not in there}


def warn_of_missing(model: nn.Module) -> None:
    """Warn if the network was trained with multipliers that it does not have now."""
    for name, factor in missing(model).items():
        warnings.warn(
            f"the config of this {type(model).__name__} says that it was trained with the input of {name} "
            f"multiplied by {factor:.4g}, but there is no multiplier on it, so it computes something else. "
            "Call plan.attach(model) first; or save the network after theodolite.surgery.bake(model, inputs)",
            stacklevel=3,
        )


def checked(mark: Any, where: str) -> dict[str, float]:
    """The multipliers in a mark that was read from a file, checked.

    >>> checked({"multipliers": {"lm_head": 0.25}}, "the config")
    {'lm_head': 0.25}
    """
    found = mark.get("multipliers", {}) if isinstance(mark, Mapping) else None
    if not isinstance(found, Mapping) or not all(
        isinstance(name, str) and is_number(factor) and factor for name, factor in found.items()
    ):
        raise UseError(
            f"{where} has the multipliers {found!r:.80} under {MARK!r}: give finite numbers other than 0 by "
            "the names of modules, or save the network again"
        )
    return {name: float(factor) for name, factor in found.items()}


def _note(factor: float, module: nn.Module, state: Any, prefix: str, metadata: dict[str, Any]) -> None:
    """Write the multiplier into the metadata of a saved state."""
    metadata[METADATA] = factor


def _compare(
    factor: float, module: nn.Module, state: Any, prefix: str, metadata: dict[str, Any], *_: Any
) -> None:
    """Warn if a state was saved without the multiplier, or with another one."""
    if "version" not in metadata:  # not of `state_dict`: nothing is known of it
        return
    saved = metadata.get(METADATA)
    if saved is None or not math.isclose(saved, factor):
        where = prefix[:-1] or type(module).__name__
        of = "without a multiplier" if saved is None else f"with the multiplier {saved:.4g}"
        warnings.warn(
            f"these weights were saved from a network {of} on the input of {where}, and this network has "
            f"{factor:.4g}: with them it computes something else than that network did. Load "
            "weights after theodolite.surgery.bake into the plain network, not after plan.attach",
            stacklevel=2,
        )


def _let_compiled_code_see_hooks() -> None:
    """Make `torch.compile` check for hooks: by default it runs code compiled for a network without them."""
    from torch._dynamo import config, reset, utils  # a second, which the first optimizer takes anyway

    if config.skip_nnmodule_hook_guards:
        config.skip_nnmodule_hook_guards = False
        if utils.counters["frames"]:  # something was compiled; the reset imports all of torch's compiler
            reset()


def _configs(modules: Mapping[str, nn.Module], name: str) -> Iterator[tuple[Any, str]]:
    """The configs of the Hugging Face models that contain a module, each with the model's prefix."""
    parts = name.split(".") if name else []
    for end in range(len(parts) + 1):
        around = ".".join(parts[:end])
        module = modules.get(around)
        config = getattr(module, "config", None)
        if hasattr(module, "save_pretrained") and hasattr(config, "to_dict"):
            yield config, f"{around}." if around else ""
