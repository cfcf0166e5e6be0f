"""Where a network holds a tensor."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from theodolite.anatomy.names import canonical_modules


@dataclass(frozen=True)
class Held:
    """A tensor of a network, where it is held."""

    module: nn.Module
    attribute: str

    @property
    def tensor(self) -> Tensor:
        """As it is now."""
        tensor: Tensor = getattr(self.module, self.attribute)
        return tensor


def holders(model: nn.Module, tensor: Tensor) -> list[Held]:
    """All places where a parameter is held: several, if modules share it."""
    found = {
        (id(module), attribute): Held(module, attribute)
        for _, module in canonical_modules(model)
        for attribute, one in module._parameters.items()
        if one is tensor
    }
    return list(found.values())


def held(model: nn.Module, name: str) -> Held:
    """Where a parameter or a buffer of that canonical name is held."""
    prefix, _, attribute = name.rpartition(".")
    return Held(dict(canonical_modules(model))[prefix], attribute)
