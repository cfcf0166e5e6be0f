"""Parameters one forward pass did not touch: an expert no token was sent to is like the expert beside it."""

from __future__ import annotations

from torch import nn

from theodolite.anatomy.names import canonical_modules, canonical_parameters


def lend(model: nn.Module, used: set[str]) -> dict[str, str]:
    """By unused parameter: the used one of the same shape in another element of the same list of modules."""
    modules = dict(canonical_modules(model))
    shapes = {name: tensor.shape for name, tensor in canonical_parameters(model)}
    lent: dict[str, str] = {}
    for name in shapes:
        if name in used:
            continue
        steps = name.split(".")
        for position in range(len(steps) - 2, -1, -1):
            container = modules.get(".".join(steps[:position]))
            if not isinstance(container, (nn.ModuleList, nn.ModuleDict)):
                continue
            for key, _ in container.named_children():
                other = ".".join([*steps[:position], key, *steps[position + 1 :]])
                if other in used and shapes.get(other) == shapes[name]:
                    lent[name] = other
                    break
            if name in lent:
                break
    return lent
