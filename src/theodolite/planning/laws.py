"""By which law the network's own initialisation draws each tensor."""

from __future__ import annotations

from theodolite.anatomy.names import canonical_parameters
from theodolite.building import build_model
from theodolite.calling import Build
from theodolite.planning.law import Law
from theodolite.size import Size


def read_laws(build: Build, size: Size) -> dict[str, Law]:
    """The law of every tensor, by canonical name."""
    laws = {}
    for name, tensor in canonical_parameters(build_model(build, size, seed=0)):
        values = tensor.detach().double()
        if (values == values.flatten()[0]).all():
            laws[name] = Law("constant", mean=values.flatten()[0].item())
        else:
            laws[name] = Law("normal", std=values.square().mean().sqrt().item())
    return laws
