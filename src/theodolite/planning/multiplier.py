"""The hook that multiplies what a readout reads, and the mark that it leaves in checkpoints.

A hook is not part of the weights. So that a checkpoint says which network its weights are of, a network with
multipliers leaves a mark in what is saved of it: in the metadata of `state_dict`, which `torch.save` keeps,
and in the config of a Hugging Face model, which `save_pretrained` writes.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from theodolite.anatomy.names import canonical_modules
from theodolite.core.errors import UseError

MARK = "theodolite"
"""The key in a Hugging Face config, and in the metadata of a file of safetensors."""
METADATA = "theodolite_multiplier"
"""The key in a module's part of the metadata of `state_dict`."""


class Multiplier:
    """A forward pre-hook that multiplies the first tensor a module is called with."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __repr__(self) -> str:
        return f"Multiplier({self.factor:.4g})"

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
    """Put multipliers on what modules read, in place of all there are, and the mark on what is saved.

    Args:
        model: the network.
        multipliers: by the canonical name of a module.
        of: what asks for them, for the error if there is no such module.
    """
    modules = dict(canonical_modules(model))
    for name, factor in multipliers.items():
        if name not in modules:
            raise UseError(
                f"{of} multiplies what {name} reads by {factor:.4g}, but this {type(model).__name__} has "
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
        module.register_state_dict_post_hook(_Saved(factor))
        module.register_load_state_dict_pre_hook(_Loaded(factor))
        config, prefix = next(_configs(modules, name), (None, ""))
        if config is not None:
            known = getattr(config, MARK, {}).get("multipliers", {})
            setattr(config, MARK, {"multipliers": {**known, name.removeprefix(prefix): factor}})


def detach_multipliers(model: nn.Module) -> None:
    """Take all multipliers off a network, and their mark."""
    modules = dict(canonical_modules(model))
    for name, module in modules.items():
        for key in [key for key, hook in module._forward_pre_hooks.items() if isinstance(hook, Multiplier)]:
            del module._forward_pre_hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)
        for hooks in (module._state_dict_hooks, module._load_state_dict_pre_hooks):
            for key in [key for key, hook in hooks.items() if isinstance(_bare(hook), (_Saved, _Loaded))]:
                del hooks[key]
        for config, _ in _configs(modules, name):
            if hasattr(config, MARK):
                delattr(config, MARK)


def missing(model: nn.Module) -> dict[str, float]:
    """Multipliers that a network's Hugging Face config names, but that are not on the network."""
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
    """Warn of a network that was trained with multipliers and does not have them now."""
    for name, factor in missing(model).items():
        warnings.warn(
            f"the config of this {type(model).__name__} says that it was trained with what {name} reads "
            f"multiplied by {factor:.4g}, but there is no multiplier on it, so it computes something else. "
            "Call plan.attach(model) first; or save the network after plan.bake(model), which needs none",
            stacklevel=3,
        )


def checked(mark: Any, where: str) -> dict[str, float]:
    """The multipliers in a mark that was read from a file.

    >>> checked({"multipliers": {"lm_head": 0.25}}, "the config")
    {'lm_head': 0.25}
    """
    found = mark.get("multipliers", {}) if isinstance(mark, Mapping) else None
    if not isinstance(found, Mapping) or not all(
        isinstance(name, str) and type(factor) in (int, float) and math.isfinite(factor) and factor
        for name, factor in found.items()
    ):
        raise UseError(
            f"{where} says under {MARK!r} of its multipliers {found!r:.80}: they are finite numbers other "
            "than 0 by the names of modules. Correct it, or save the network again"
        )
    return {name: float(factor) for name, factor in found.items()}


class _Saved:
    """Notes the multiplier in the metadata of a state that is saved."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, module: nn.Module, state: Any, prefix: str, metadata: dict[str, Any]) -> None:
        metadata[METADATA] = self.factor


class _Loaded:
    """Warns of a state that was saved without the multiplier, or with another one."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, module: nn.Module, state: Any, prefix: str, metadata: dict[str, Any], *_: Any) -> None:
        if "version" not in metadata:  # not of `state_dict`: nothing is known of it
            return
        saved = metadata.get(METADATA)
        if saved is None or not math.isclose(saved, self.factor):
            where = prefix[:-1] or type(module).__name__
            of = "without a multiplier" if saved is None else f"with the multiplier {saved:.4g}"
            warnings.warn(
                f"these weights were saved from a network {of} on what {where} reads, and this network has "
                f"{self.factor:.4g}: with them it computes something else than that network did. Weights "
                "after plan.bake(model) belong into the plain network, without plan.build or plan.attach",
                stacklevel=2,
            )


def _let_compiled_code_see_hooks() -> None:
    """Have `torch.compile` check hooks before it runs what it compiled.

    By default it does not, and runs what it compiled for another network of the same class, without hooks.
    """
    from torch._dynamo import config, reset, utils  # a second, which the first optimizer takes anyway

    if config.skip_nnmodule_hook_guards:
        config.skip_nnmodule_hook_guards = False
        if utils.counters["frames"]:  # something was compiled; the reset imports all of torch's compiler
            reset()


def _bare(hook: Any) -> Any:
    return getattr(hook, "hook", hook)


def _configs(modules: Mapping[str, nn.Module], name: str) -> Iterator[tuple[Any, str]]:
    """The configs that Hugging Face models around a module are saved with, and the models' prefixes."""
    parts = name.split(".") if name else []
    for end in range(len(parts) + 1):
        around = ".".join(parts[:end])
        module = modules.get(around)
        config = getattr(module, "config", None)
        if hasattr(module, "save_pretrained") and hasattr(config, "to_dict"):
            yield config, f"{around}." if around else ""
