"""Which group of an optimizer trains a tensor, and how it comes into another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from theodolite.anatomy.names import canonical_parameters


@dataclass(frozen=True)
class Groups:
    """The groups of an optimizer that trains a network. Lists are replaced, not written to."""

    model: nn.Module
    optimizer: Optimizer

    def of(self, tensor: Tensor) -> dict[str, Any] | None:
        """The group that trains a tensor."""
        for group in self.optimizer.param_groups:
            if any(one is tensor for one in group["params"]):
                return group
        return None

    def join(self, tensor: Tensor, hosts: Sequence[Tensor], *, decays: bool = True) -> None:
        """Train a tensor in the group of the first of its hosts that has one, or in one without decay.

        A schedule has a number for each group: once there is one, there is no new group.
        """
        if self.of(tensor) is not None:
            return
        group = next((found for host in hosts if (found := self.of(host)) is not None), None)
        if group is None:
            return
        name = next(name for name, one in canonical_parameters(self.model) if one is tensor)
        if not decays and group.get("weight_decay"):
            options = {
                key: value for key, value in group.items() if key not in ("params", "param_names", "name")
            }
            options["weight_decay"] = 0.0
            others = [
                each
                for each in self.optimizer.param_groups
                if {key: each.get(key) for key in options} == options
            ]
            if not others and not getattr(self.optimizer.step, "_wrapped_by_lr_sched", False):
                params = [(name, tensor)] if "param_names" in group else [tensor]
                named = {"name": f"{group['name']}-undecayed"} if "name" in group else {}
                self.optimizer.add_param_group({**options, **named, "params": params})
                return
            group = others[0] if others else group
        group["params"] = [*group["params"], tensor]
        if "param_names" in group:
            group["param_names"] = [*group["param_names"], name]

    def leave(self, tensor: Tensor) -> None:
        """Take a tensor out of its group."""
        group = self.of(tensor)
        if group is not None:
            place = next(index for index, one in enumerate(group["params"]) if one is tensor)
            for key in ("params", "param_names"):
                if key in group:
                    group[key] = [one for index, one in enumerate(group[key]) if index != place]

    def rename(self) -> None:
        """Where groups know their tensors by name: the names that they have now."""
        names = {id(tensor): name for name, tensor in canonical_parameters(self.model)}
        for group in self.optimizer.param_groups:
            if "param_names" in group:
                known = zip(group["params"], group["param_names"], strict=True)
                group["param_names"] = [names.get(id(tensor), name) for tensor, name in known]

    @contextmanager
    def kept_on_failure(self) -> Iterator[None]:
        """Groups and state are as before if something is raised; no tensor of it may be written to."""
        groups = [dict(group) for group in self.optimizer.param_groups]
        state = {tensor: dict(held) for tensor, held in self.optimizer.state.items()}
        try:
            yield
        except BaseException:
            self.optimizer.param_groups[:] = groups
            self.optimizer.state.clear()
            self.optimizer.state.update(state)
            raise
