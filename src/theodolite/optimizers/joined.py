"""Several optimizers as one object, each of which makes its own steps."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from torch.optim import Optimizer

from theodolite.core.errors import UseError
from theodolite.optimizers.step_checks import evaluated


class Joined(Optimizer):
    """Optimizers that somebody else made, as one: their groups in order, and one state to save.

    Unlike `Planned` it changes nothing about the optimizers: a step is a step of each, in order.

    >>> import torch
    >>> weight, bias = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    >>> both = Joined([torch.optim.SGD([weight], lr=0.1), torch.optim.AdamW([bias], lr=0.2)])
    >>> (weight.sum() + bias.sum()).backward()
    >>> both.step()
    >>> [group["lr"] for group in both.param_groups], round(weight[0].item(), 3), round(bias[0].item(), 3)
    ([0.1, 0.2], 0.9, 0.798)
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        # Not that of torch, which would make groups of its own: these stay those of the optimizers.
        if not optimizers:
            raise UseError("optimizers is empty: give at least one")
        self.optimizers = tuple(optimizers)
        for hooks in ("step_pre", "step_post", "state_dict_pre", "state_dict_post"):
            setattr(self, f"_optimizer_{hooks}_hooks", OrderedDict())
        for hooks in ("pre", "post"):
            setattr(self, f"_optimizer_load_state_dict_{hooks}_hooks", OrderedDict())
        self._patch_step_function()

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of all, in order; the dictionaries are those of the optimizers."""
        return [group for one in self.optimizers for group in one.param_groups]

    @property
    def state(self) -> dict[Any, Any]:  # type: ignore[override]
        """The states of all tensors that have one."""
        return {tensor: state for one in self.optimizers for tensor, state in one.state.items()}

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """Those of the first."""
        return self.optimizers[0].defaults

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of each. A closure is called once, before the first."""
        loss = evaluated(closure)
        for one in self.optimizers:
            one.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""
        for one in self.optimizers:
            one.zero_grad(set_to_none)

    def train(self) -> None:
        """Switch those that average weights to the parameters at which gradients are taken."""
        self._switch("train")

    def eval(self) -> None:
        """Switch those that average weights to the averages."""
        self._switch("eval")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse: which of the optimizers should have it is not known."""
        raise UseError("a group cannot be added to several optimizers: add it to one of `.optimizers`")

    def state_dict(self) -> dict[str, Any]:
        """The states of all, in order."""
        return {"optimizers": [one.state_dict() for one in self.optimizers]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave."""
        states = state_dict.get("optimizers", ())
        if len(states) != len(self.optimizers):
            raise UseError(f"the state is of {len(states)} optimizers, and these are {len(self.optimizers)}")
        for one, state in zip(self.optimizers, states, strict=True):
            one.load_state_dict(state)

    def __getstate__(self) -> dict[str, Any]:
        return {"optimizers": self.optimizers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        Joined.__init__(self, state["optimizers"])

    def __repr__(self) -> str:
        return f"Joined({', '.join(type(one).__name__ for one in self.optimizers)})"

    def _switch(self, mode: str) -> None:
        for one in self.optimizers:
            if hasattr(one, mode):
                getattr(one, mode)()
