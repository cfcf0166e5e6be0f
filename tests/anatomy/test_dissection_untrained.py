"""Tensors that take no gradient, or that nothing reads, have roles of their own: no rule is for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from theodolite.anatomy import dissect
from theodolite.core.errors import UseError
from theodolite.core.size import Size

SIZE = Size(16, 2)
INPUTS = torch.zeros(3, 5, 6)


class Net(nn.Module):
    """Residual blocks over a frozen table of positions; a token that nothing reads."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.embed = nn.Linear(6, width)
        self.positions = nn.Parameter(torch.randn(5, width), requires_grad=False)
        self.token = nn.Parameter(torch.zeros(width))
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.head = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) + self.positions
        for block in self.blocks:
            x = x + block(torch.relu(x))
        return self.head(x)


def roles(build: Any, **kwargs: Any) -> dict[str, str]:
    size = None if isinstance(build, nn.Module) else SIZE
    return {name: part.role for name, part in dissect(build, INPUTS, size=size, **kwargs).items()}


@pytest.mark.parametrize("build", [Net, Net(16, 2)], ids=["a build function", "a ready module"])
def test_frozen_and_unused_tensors_are_told_apart_and_the_rest_is_as_before(build: Any) -> None:
    found = roles(build)
    assert (found.pop("positions"), found.pop("token")) == ("frozen", "unused")
    assert set(found.values()) == {"input", "hidden", "output", "bias"}


def test_a_frozen_weight_is_still_on_the_path() -> None:
    def frozen(width: int, depth: int) -> nn.Module:
        model = Net(width, depth)
        model.blocks.requires_grad_(False)
        return model

    anatomy, before = dissect(frozen, INPUTS, size=SIZE), dissect(Net, INPUTS, size=SIZE)
    assert anatomy["blocks.1.weight"].role == "frozen"
    assert anatomy.branches == before.branches
    for name, part in anatomy.items():
        assert (part.fan_in, part.fan_out, part.block, part.ends_branch) == (
            before[name].fan_in,
            before[name].fan_out,
            before[name].block,
            before[name].ends_branch,
        )
    assert anatomy["blocks.1.bias"].kind == "bias"
    assert {part.name for part in anatomy.trained} == {
        name for name, part in before.items() if part.trained and not name.startswith("blocks")
    }


@pytest.mark.parametrize("shape", [lambda w: (5, 16), lambda w: (80 // w, 1, 16)], ids=["stays", "shrinks"])
def test_width_may_do_anything_to_what_is_left_alone(shape: Any) -> None:
    class Odd(Net):
        def __init__(self, width: int, depth: int) -> None:
            super().__init__(width, depth)
            self.positions = nn.Parameter(torch.ones(shape(width)), requires_grad=False)
            if width == SIZE.width:
                self.only_here = nn.Parameter(torch.zeros(3))

        def forward(self, x: Tensor) -> Tensor:
            x = self.embed(x) + self.positions.sum()
            return self.head(x)

    found = dissect(Odd, INPUTS, size=SIZE)
    assert found["positions"].role == "frozen"
    assert found["positions"].grown_axes == ()
    assert found["only_here"].role == "unused"


def test_a_role_that_is_said_comes_first() -> None:
    found = roles(Net, roles={"positions": "bias", "token": "gain", "embed.*": "frozen"})
    assert found["positions"], found["token"] == ("bias", "gain")
    assert found["embed.weight"] == found["embed.bias"] == "frozen"


def test_the_table_says_how_many_are_left_alone() -> None:
    said = " ".join(str(dissect(Net, INPUTS, size=SIZE)).split())
    assert (
        "1 tensor is frozen (positions), and 1 tensor is used by nothing in the forward pass (token): not "
        "trained." in said
    )


def test_an_expert_that_got_no_token_is_not_unused() -> None:
    class Experts(Net):
        def __init__(self, width: int, depth: int) -> None:
            super().__init__(width, depth)
            self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.experts[0](self.embed(x)))

    assert roles(Experts)["experts.1.weight"] == "hidden"


class Gated(nn.Module):
    """Gate and up in one weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.both, self.down = nn.Linear(width, 4 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.both(x).chunk(2, -1)
        found: Tensor = self.down(gate.sigmoid() * up)
        return found


class Routed(nn.Module):
    """Experts that are called with the tokens sent to them, be it none; and one outside of their list."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(4, width), nn.Linear(width, 3)
        self.experts, self.spare = nn.ModuleList(Gated(width) for _ in range(2)), Gated(width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        y = torch.zeros_like(x)
        for chosen, expert in enumerate([*self.experts, self.spare]):
            sent = (torch.zeros(len(x)) == chosen).nonzero()[:, 0]
            y = y.index_add(0, sent, expert(x[sent]))
        found: Tensor = self.head(x + y)
        return found


@pytest.mark.parametrize("size", [None, Size(16, 1)], ids=["a ready module", "a build function"])
def test_an_expert_that_is_called_with_no_token_is_like_the_one_beside_it(size: Size | None) -> None:
    anatomy = dissect(Routed if size else Routed(16, 1), torch.randn(5, 4), size=size)
    for expert in ("experts.0", "experts.1"):
        both = anatomy[f"{expert}.both.weight"]
        assert (both.role, both.rows) == ("hidden", (((0, 32),), ((32, 64),)))
        assert anatomy[f"{expert}.down.weight"].ends_branch
    assert anatomy["spare.both.weight"].role == "hidden"  # nothing is beside it


def test_a_network_without_a_trained_tensor_has_no_plan() -> None:
    from theodolite.planning import plan

    with pytest.raises(UseError, match="no tensor of the network at 16 × 2 is trained: all 10 are frozen"):
        plan(lambda w, d: Net(w, d).requires_grad_(False), INPUTS, size=SIZE, base=SIZE, lr=0.1)
