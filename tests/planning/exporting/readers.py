"""The schemas of trainers, as small readers written from their documentation, for where they are missing.

`module(name)` puts stand-ins for the modules that an exported file imports into `sys.modules`.
"""

from __future__ import annotations

import fnmatch
import math
import re
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from theodolite.optimizers.orthogonal import newton_schulz


@contextmanager
def modules(**given: Any) -> Iterator[None]:
    """Let modules by these names be imported: `a__b` stands for a.b; the values are what they hold."""
    with pytest.MonkeyPatch.context() as patch:
        for name, held in given.items():
            steps = name.split("__")
            for end in range(1, len(steps) + 1):
                module = types.ModuleType(".".join(steps[:end]))
                module.__path__ = []
                patch.setitem(__import__("sys").modules, module.__name__, module)
            for key, value in held.items():
                setattr(module, key, value)
        yield


def orthogonal(matrix: Tensor, epsilon: Any = 1e-7) -> Tensor:
    """The orthogonal factor of a matrix, or of each of a stack, as the plan's Muon computes it."""
    return newton_schulz(matrix.float(), steps=5, eps=float(epsilon))


# torchtitan


@dataclass(kw_only=True)
class ParamGroupConfig:
    """A regular expression and what the parameters it matches are trained by."""

    pattern: str
    optimizer_name: str
    optimizer_kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class TitanConfig:
    """`OptimizersContainer.Config`."""

    param_groups: list[ParamGroupConfig] = field(default_factory=list)
    implementation: str = "fused"
    optimizer_factory_kwargs_by_name: dict[str, dict[str, Any]] = field(default_factory=dict)


TITAN = {
    "OptimizersContainer": types.SimpleNamespace(Config=TitanConfig),
    "ParamGroupConfig": ParamGroupConfig,
}


def read_titan(config: Any, model: nn.Module) -> dict[str, tuple[str, dict[str, Any]]]:
    """By tensor: class and options. The first pattern that is found in the name; each needs a tensor."""
    found: dict[str, tuple[str, dict[str, Any]]] = {}
    for group in config.param_groups:
        names = [
            name
            for name, tensor in model.named_parameters()
            if tensor.requires_grad and name not in found and re.compile(group.pattern).search(name)
        ]
        assert names, f"{group.pattern} matches no parameter"
        found |= dict.fromkeys(names, (group.optimizer_name, group.optimizer_kwargs))
    assert set(found) == {name for name, tensor in model.named_parameters() if tensor.requires_grad}
    return found


# dion


class DionMuon(torch.optim.Optimizer):
    """dion's Muon: summed momentum, `adjust_lr`, `flatten`, `split_sizes`, and AdamW by `algorithm`.

    Parameters of one shape in one group are stacked, and `flatten` keeps the first dimension of the stack.
    """

    def __init__(self, params: Any, distributed_mesh: Any = None, **options: Any) -> None:
        usual = {
            "lr": 0.01,
            "mu": 0.95,
            "beta1": 0.9,
            "beta2": 0.95,
            "weight_decay": 0.01,
            "epsilon": 1e-8,
            "nesterov": False,
            "adjust_lr": "spectral_norm",
            "flatten": False,
            "algorithm": "muon",
        }
        self.orthogonal = options.pop("newton_schulz_func", orthogonal)
        super().__init__(params, usual | options)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step."""
        for group in self.param_groups:
            for shape in {weight.shape for weight in group["params"]}:
                weights = [weight for weight in group["params"] if weight.shape == shape]
                updates = {"muon": self._muon, "adamw": self._adamw}[group["algorithm"]](group, weights)
                for weight, update in zip(weights, updates, strict=True):
                    weight.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * update)

    def _muon(self, group: dict[str, Any], weights: list[Tensor]) -> Any:
        ahead = torch.stack([self._ahead(group, weight) for weight in weights])
        ahead = ahead[0] if len(weights) == 1 else ahead
        matrices = ahead.flatten(1) if group["flatten"] else ahead
        sizes = group.get("split_sizes") or (matrices.shape[-2],)
        assert sum(sizes) == matrices.shape[-2]
        adjusted = weights[0].flatten(1) if group["flatten"] else weights[0]
        made = [
            self.orthogonal(block, group["epsilon"])
            * self._adjusted(group["adjust_lr"], (size, adjusted.shape[-1]))
            for size, block in zip(
                group.get("split_sizes") or (adjusted.shape[-2],), matrices.split(sizes, dim=-2), strict=True
            )
        ]
        return torch.cat(made, dim=-2).view(len(weights), *weights[0].shape)

    def _ahead(self, group: dict[str, Any], weight: Tensor) -> Tensor:
        momentum = self.state[weight].setdefault("momentum", torch.zeros_like(weight))
        momentum.mul_(group["mu"]).add_(weight.grad)
        return group["mu"] * momentum + weight.grad if group["nesterov"] else momentum.clone()

    @staticmethod
    def _adjusted(how: str | None, shape: tuple[int, ...]) -> float:
        rows, columns = shape[-2:]
        if how is None:
            return 1.0
        return {"rms_norm": 0.2 * math.sqrt(max(rows, columns)), "spectral_norm": math.sqrt(rows / columns)}[
            how
        ]

    def _adamw(self, group: dict[str, Any], weights: list[Tensor]) -> list[Tensor]:
        betas = (group["beta1"], group["beta2"])
        return [adam(self.state[weight], weight, betas, group["epsilon"]) for weight in weights]


def adam(state: Any, weight: Tensor, betas: tuple[float, float], eps: float) -> Tensor:
    """The update of Adam."""
    grad = weight.grad
    assert grad is not None
    if not state:
        state |= {"step": 0, "mean": torch.zeros_like(weight), "square": torch.zeros_like(weight)}
    state["step"] += 1
    state["mean"].lerp_(grad, 1 - betas[0])
    state["square"].lerp_(grad**2, 1 - betas[1])
    mean = state["mean"] / (1 - betas[0] ** state["step"])
    return mean / ((state["square"] / (1 - betas[1] ** state["step"])).sqrt() + eps)


# DeepSpeed


class DeepSpeedMuon(torch.optim.Optimizer):
    """`MuonWithAuxAdam`: Jordan's factor of the last two dimensions, Nesterov's form, blocks, and Adam."""

    def __init__(self, param_groups: list[dict[str, Any]]) -> None:
        for group in param_groups:
            assert "use_muon" in group
            usual: dict[str, Any] = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0}
            if group["use_muon"]:
                usual = {"lr": 0.02, "momentum": 0.95, "weight_decay": 0}
            group |= {key: value for key, value in usual.items() if key not in group}
        super().__init__(param_groups, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step."""
        for group in self.param_groups:
            for weight in group["params"]:
                assert weight.use_muon == group["use_muon"], "ZeRO reads the attribute"
                state = self.state[weight]
                if group["use_muon"]:
                    update = self._muon(state, weight, group["momentum"])
                else:
                    update = adam(state, weight, group["betas"], group["eps"])
                weight.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * update)

    @staticmethod
    def _muon(state: Any, weight: Tensor, momentum: float) -> Tensor:
        average = state.setdefault("momentum_buffer", torch.zeros_like(weight))
        average.lerp_(weight.grad, 1 - momentum)
        ahead = torch.lerp(weight.grad, average, momentum)
        if count := getattr(weight, "muon_num_heads", None):
            ahead = ahead.unflatten(0, (count, len(ahead) // count))
        rows, columns = ahead.shape[-2:]
        return (orthogonal(ahead) * max(1, rows / columns) ** 0.5).view_as(weight)


# Megatron


@dataclass(frozen=True)
class ParamWithNamePredicate:
    """A function of a parameter and its name; equal by its own name."""

    name: str
    fn: Callable[[Any, str], bool] = field(compare=False, hash=False)


@dataclass(frozen=True)
class ParamKey:
    """Which parameters an override is for."""

    name: str | tuple[str, ...] = ()
    attr: str | tuple[str, ...] = ()
    with_name_predicate: Any = ()

    def matches(self, param: Tensor, name: str) -> bool:
        """By name, attribute or predicate."""
        names = (self.name,) if isinstance(self.name, str) else self.name
        if any(fnmatch.fnmatch(name, one) for one in names):
            return True
        return bool(self.with_name_predicate) and self.with_name_predicate.fn(param, name)


MEGATRON = {"ParamKey": ParamKey, "ParamWithNamePredicate": ParamWithNamePredicate}


def read_megatron(overrides: dict[Any, dict[str, Any]], model: nn.Module) -> dict[str, dict[str, Any]]:
    """By tensor: its overrides, merged. Different values for one key are an error."""
    found: dict[str, dict[str, Any]] = {}
    for name, tensor in model.named_parameters():
        merged: dict[str, Any] = {}
        for key, override in overrides.items():
            if key.matches(tensor, name):
                for option, value in override.items():
                    assert merged.setdefault(option, value) == value, f"conflicting overrides for {option}"
        found[name] = merged
    return found
