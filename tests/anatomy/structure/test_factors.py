"""Numbers that a network multiplies by in its own forward pass count, once.

A network with a number that goes with size is held against its control, in which the number stays what it is
at base size: planned for a larger size, both compute the same and train alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import theodolite as th
from theodolite import Size

BASE = Size(16, 2)
INPUTS = torch.randn(6, 8, generator=torch.Generator().manual_seed(3))
TOKENS = torch.arange(6)[None]
Number = Callable[[Size], float]


def one(size: Size) -> float:
    return 1.0


class Net(nn.Module):
    """`head(x + n·f(x) + …)·m`, with the numbers written in one of several ways."""

    def __init__(self, size: Size, branch: float, readout: float, first: float, way: str) -> None:
        super().__init__()
        self.numbers = branch, readout, first
        self.way = way
        self.embed = nn.Linear(8, size.width)
        self.up = nn.ModuleList(nn.Linear(size.width, 2 * size.width) for _ in range(size.depth))
        self.down = nn.ModuleList(nn.Linear(2 * size.width, size.width) for _ in range(size.depth))
        self.extra = nn.ModuleList(nn.Linear(2 * size.width, size.width) for _ in range(size.depth))
        self.head = nn.Linear(size.width, 3)

    def forward(self, x: Tensor) -> Tensor:
        branch, readout, first = self.numbers
        x = self.embed(x) * first
        for up, down, extra in zip(self.up, self.down, self.extra, strict=True):
            hidden = up(x).relu()
            x = self.add(x, down(hidden), extra(hidden), branch)
        if self.way == "behind":
            return self.head(readout * x)
        return self.head(x) * readout

    def add(self, x: Tensor, one: Tensor, two: Tensor, number: float) -> Tensor:
        match self.way:
            case "alpha":
                return torch.add(x, one + two, alpha=number)
            case "apart":
                return x + (one / (1 / number)).relu() + number * two
            case "filled":
                return x + (one + two) * torch.full((), number)
            case "twice":
                return x + (number / 4) * ((one + two).unsqueeze(0) * 4).squeeze(0)
        return x + number * (one + two)


def build(way: str = "product", at: Size | None = None, **numbers: Number) -> Any:
    """A network whose numbers go with its size, or stay what they are at another."""

    def made(width: int, depth: int) -> nn.Module:
        size = at or Size(width, depth)
        said = {name: numbers.get(name, one)(size) for name in ("branch", "readout", "first")}
        return Net(Size(width, depth), way=way, **said)

    return made


def trained(plan: th.Plan, inputs: Tensor, steps: int = 3) -> list[Tensor]:
    """The outputs at the start and after each step."""
    model = plan.build(seed=0).double()
    optimizer = plan.optimizer(model)
    found = []
    inputs = inputs.double() if inputs.is_floating_point() else inputs
    for _ in range(steps + 1):
        output = model(inputs)
        found.append(output.detach())
        optimizer.zero_grad()
        (output * torch.linspace(-1, 1, output.shape[-1], dtype=output.dtype)).mean().backward()
        optimizer.step()
    return found


def train_alike(own: Any, control: Any, size: Size, inputs: Tensor = INPUTS, **options: Any) -> None:
    options = {"lr": 2**-6, "eps": 1e-3, "weight_decay": 0.1} | options
    here = trained(th.plan(own, inputs, size=size, base=BASE, **options), inputs)
    there = trained(th.plan(control, inputs, size=size, base=BASE, **options), inputs)
    assert (there[-1] - there[0]).abs().max() > 1e-3 * there[0].abs().max()
    torch.testing.assert_close(here, there, rtol=1e-4, atol=1e-5)


DEPTH: dict[str, Number] = {
    "2/L": lambda size: 2 / size.depth,
    "(2L)^-½": lambda size: (2 * size.depth) ** -0.5,
    "-6/L": lambda size: -6 / size.depth,
}


@pytest.mark.parametrize("number, depth", [("2/L", 8), ("(2L)^-½", 4), ("-6/L", 4)])
def test_depth_in_the_forward_pass_counts_once(number: str, depth: int) -> None:
    own, control = build(branch=DEPTH[number]), build(branch=DEPTH[number], at=BASE)
    train_alike(own, control, Size(16, depth))


@pytest.mark.parametrize("way", ["alpha", "apart", "filled", "twice"])
def test_however_it_is_written(way: str) -> None:
    numbers = {"branch": DEPTH["2/L"]}
    train_alike(build(way, **numbers), build(way, at=BASE, **numbers), Size(32, 4))
    anatomy = th.dissect(build(way, **numbers), INPUTS, size=Size(16, 4))
    assert {name for name, part in anatomy.items() if part.factor != 1} == {
        f"{name}.{block}.{kind}"
        for name in ("down", "extra")
        for block in range(4)
        for kind in ("weight", "bias")
    }
    assert {part.factor for part in anatomy.values()} == {1.0, 0.5}


@pytest.mark.parametrize("optimizer", ["sgd", "lion", "muon-kimi"])
def test_for_every_optimizer(optimizer: str) -> None:
    numbers = {
        "branch": DEPTH["(2L)^-½"],
        "readout": lambda size: 16 / size.width,
        "first": lambda size: math.sqrt(size.width),
    }
    options = {} if optimizer == "muon-kimi" else {"eps": 1e-8}
    train_alike(
        build(**numbers), build(at=BASE, **numbers), Size(64, 4), optimizer=optimizer, lr=2**-9, **options
    )


@pytest.mark.parametrize("way", ["product", "behind"])
@pytest.mark.parametrize("width", [32, 64])
def test_width_in_front_of_the_logits_counts_once(way: str, width: int) -> None:
    numbers: dict[str, Number] = {"readout": lambda size: 32 / size.width}
    train_alike(build(way, **numbers), build(way, at=BASE, **numbers), Size(width, 2))
    plan = th.plan(build(way, **numbers), INPUTS, size=Size(width, 2), base=BASE, lr=2**-6)
    assert plan["head.weight"].lr == 2**-6
    # A number behind the head reaches its bias too, which should not have it.
    assert plan["head.bias"].lr == (2**-6 if way == "behind" else 2**-6 * width / 16)


def test_width_behind_the_embedding_counts_once() -> None:
    numbers: dict[str, Number] = {"first": lambda size: math.sqrt(size.width)}
    train_alike(build(**numbers), build(at=BASE, **numbers), Size(64, 2))


def test_a_number_that_does_not_go_with_size_changes_nothing() -> None:
    def rows(branch: float, readout: float) -> list[Any]:
        plan = th.plan(
            build(branch=lambda size: branch, readout=lambda size: readout),
            INPUTS,
            size=Size(64, 8),
            base=BASE,
            lr=0.1,
        )
        return [(row.init, row.lr, row.weight_decay, row.eps, row.reasons) for row in plan.rows.values()]

    assert rows(0.37, 3.0) == rows(1.0, 1.0)


class Tied(nn.Module):
    """A table times `first`, branches, and the same table as the readout of what is multiplied by `last`."""

    def __init__(self, width: int, depth: int, first: float, last: float, capped: bool) -> None:
        super().__init__()
        self.first, self.last, self.capped = first, last, capped
        self.embed = nn.Embedding(11, width)
        self.positions = nn.Embedding(6, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) * self.first + self.positions(tokens)
        for layer in self.layers:
            x = x + layer(x)
        logits = self.head(self.norm(x) * self.last)
        return 30 * torch.tanh(logits / 30) if self.capped else logits


def tied(first: Number, last: Number, at: Size | None = None, *, capped: bool = False) -> Any:
    def made(width: int, depth: int) -> nn.Module:
        size = at or Size(width, depth)
        return Tied(width, depth, first(size), last(size), capped)

    return made


@pytest.mark.parametrize("capped", [False, True])
@pytest.mark.parametrize(
    "first, last, multiplier",
    [
        (one, lambda size: size.width**-0.5, 1 / 2),  # T5
        (lambda size: size.width**0.5, one, 1 / 2),  # Gemma
        (lambda size: size.width**0.5, lambda size: size.width**-0.5, 1),
        (one, lambda size: 1 / size.width, 1),
    ],
    ids=["t5", "gemma", "both", "all of it"],
)
def test_a_tied_readout_keeps_what_is_left(
    first: Number, last: Number, multiplier: float, capped: bool
) -> None:
    size = Size(64, 4)
    own, control = tied(first, last, capped=capped), tied(first, last, BASE, capped=capped)
    made = th.plan(own, TOKENS, size=size, base=BASE, lr=2**-6)
    assert made.multipliers == ({"head": pytest.approx(multiplier)} if multiplier != 1 else {})
    assert th.plan(control, TOKENS, size=size, base=BASE, lr=2**-6).multipliers == {"head": 1 / 4}
    train_alike(own, control, size, TOKENS)


def test_what_the_forward_pass_does_is_explained() -> None:
    numbers: dict[str, Number] = {
        "branch": DEPTH["2/L"],
        "readout": lambda size: size.width**-0.5,
        "first": lambda size: 2 * size.width,
    }
    plan = th.plan(build(**numbers), INPUTS, size=Size(64, 8), base=BASE, lr=2**-6)
    said = {name: plan[name].reasons for name in ("down.3.weight", "head.weight", "embed.weight")}
    assert said["down.3.weight"]["α"] == (
        "1/(r_L·o) = 1: the branch's multiplier is 1/4, of which the network's own forward pass does "
        "o = 1/4; the rest is absorbed below"
    )
    assert "1/(r_in·o) = 1/2: an output's multiplier is 1/4" in said["head.weight"]["α"]
    assert "1/o = 1/4: the multiplier of this layer is 1, of which" in said["embed.weight"]["α"]
    assert "η · c/u · α = 0.01562 · 1 · 1/4 = 0.003906" in said["embed.weight"]["lr"]
    assert plan["embed.weight"].lr == 2**-8


class Untold(nn.Module):
    """Numbers that are not plain, or not of one tensor."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.next = nn.Linear(width, width, bias=False)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.scale = nn.Parameter(torch.tensor(5.0))
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.next(self.embed(x)) * torch.tensor([2.0, 3.0]).repeat(x.shape[0] // 2)[:, None]
        for layer in self.layers:
            x = x + layer(x) * self.scale
        y = self.head(x)
        return torch.cat([2 * y, 3 * y])


def test_where_it_cannot_be_told_it_is_one() -> None:
    anatomy = th.dissect(Untold, INPUTS, size=BASE)
    assert {name: part.factor for name, part in anatomy.items() if part.factor != 1} == {}


MODULES = ("spectral", "weight norm", "plain")


class Free(nn.Module):
    """A branch whose last weight is divided by a norm of itself, in one of several ways."""

    def __init__(self, width: int, way: str) -> None:
        super().__init__()
        self.way = way
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width, bias=way in MODULES)
        if way == "spectral":
            nn.utils.parametrizations.spectral_norm(self.down)
        if way == "weight norm":
            nn.utils.parametrizations.weight_norm(self.down)
        self.gain = nn.Parameter(torch.ones(width, 1)) if "gain" in way else 1.0

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x).relu()
        w = self.down.weight
        match self.way:
            case "normalised":
                return x + F.linear(hidden, F.normalize(w, dim=1))
            case "by hand" | "gain by hand":
                return x + hidden @ (self.gain * w * (w.square().mean(1, keepdim=True) + 1e-12).rsqrt()).T
            case "gain behind":
                return x + self.gain[:, 0] * F.linear(hidden, F.normalize(w, dim=1))
        return x + self.down(hidden)


def free(way: str) -> Any:
    def made(width: int, depth: int) -> nn.Module:
        return nn.Sequential(
            nn.Linear(8, width), *(Free(width, way) for _ in range(depth)), nn.Linear(width, 3)
        )

    return made


@pytest.mark.parametrize("way", ["normalised", "spectral", "by hand"])
def test_a_branch_whose_last_weight_has_no_scale_cannot_get_deeper(way: str) -> None:
    assert {branch.ends for branch in th.dissect(free(way), INPUTS, size=BASE).branches} == {()}
    with pytest.raises(th.UseError, match=r"branch 0 of block 0.*ends in no tensor that scales it"):
        th.plan(free(way), INPUTS, size=Size(16, 4), base=BASE, lr=0.1)
    assert th.plan(free(way), INPUTS, size=Size(64, 2), base=BASE, lr=0.1).rows


@pytest.mark.parametrize("way", ["weight norm", "gain by hand", "gain behind", "plain"])
def test_a_gain_on_such_a_weight_sets_the_size_of_the_branch(way: str) -> None:
    """What the first branch adds is a quarter of what it adds without a plan."""
    model = th.plan(free(way), INPUTS, size=Size(16, 8), base=BASE, lr=0.1).build(seed=0)
    unscaled = th.plan(free(way), INPUTS, size=BASE, base=BASE, lr=0.1).build(seed=0)
    x = torch.randn(5, 16)
    with torch.no_grad():
        added, before = model[1](x) - x, unscaled[1](x) - x
    torch.testing.assert_close(added, before / 4)


NUMBERS: dict[str, Callable[[Held, Tensor], Any]] = {
    "a number": lambda net, x: net.width**0.5,
    "a tensor": lambda net, x: torch.tensor(net.width**0.5),
    "a tensor of half precision": lambda net, x: torch.tensor(net.width**0.5, dtype=torch.bfloat16),
    "a new tensor": lambda net, x: x.new_tensor(x.shape[-1] ** 0.5),
    "a filled tensor": lambda net, x: x.new_full((1, 1), x.shape[-1] ** 0.5),
    "of a shape": lambda net, x: torch.tensor(x.shape[-1]).sqrt(),
    "of a shape, by full": lambda net, x: 1 / torch.full((), x.shape[-1]).pow(-0.5),
    "a buffer": lambda net, x: net.buffer,
    "a buffer of shape (1,)": lambda net, x: net.longer,
    "made of a buffer": lambda net, x: net.buffer.square().mul(4).sqrt() / 2,
    "a frozen parameter": lambda net, x: net.frozen,
    "a plain attribute": lambda net, x: net.attribute,
}


class Held(nn.Module):
    """An embedding times √width, which the network holds or makes in one of several ways."""

    def __init__(self, width: int, way: str) -> None:
        super().__init__()
        self.width, self.way = width, way
        self.embed, self.head = nn.Embedding(11, width), nn.Linear(width, 3)
        self.register_buffer("buffer", torch.tensor(width**0.5))
        self.longer = nn.Buffer(torch.full((1,), width**0.5))
        self.frozen = nn.Parameter(torch.ones(1) * width**0.5, requires_grad=False)
        self.attribute = torch.tensor(width**0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return self.head((x * NUMBERS[self.way](self, x)).relu())


@pytest.mark.parametrize("way", NUMBERS)
def test_a_number_counts_wherever_it_is_held(way: str) -> None:
    anatomy = th.dissect(lambda width, depth: Held(width, way), TOKENS, size=Size(64, 1))
    assert anatomy["embed.weight"].factor == pytest.approx(8)
    assert th.dissect(Held(64, way), TOKENS)["embed.weight"].factor == pytest.approx(8)


def test_a_number_read_from_a_pass_on_values_counts_too() -> None:
    class Peeking(Held):
        def forward(self, tokens: Tensor) -> Tensor:
            assert self.head.weight.sum() < 1e9  # a value decides
            return super().forward(tokens)

    anatomy = th.dissect(Peeking(64, "made of a buffer"), TOKENS)
    assert anatomy["embed.weight"].factor == pytest.approx(8)


LAYERS: dict[str, Callable[[Tensor, nn.Linear, int], Tensor]] = {
    "in the weight": lambda x, layer, width: F.linear(x, layer.weight * width**-0.5),
    "divided": lambda x, layer, width: F.linear(x, layer.weight / torch.tensor(width).sqrt()),
    "behind the layer": lambda x, layer, width: layer(x) * width**-0.5,
}


@pytest.mark.parametrize("way", LAYERS)
def test_a_number_on_every_layer_counts_once(way: str) -> None:
    """Weights of std 1, layers of `1/√n`: as large at every width."""

    class Layers(nn.Module):
        def __init__(self, width: int, depth: int) -> None:
            super().__init__()
            self.width = width
            self.embed = nn.Linear(8, width)
            self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(2))
            for layer in self.layers:
                nn.init.normal_(layer.weight)
            self.head = nn.Linear(width, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = self.embed(x)
            for layer in self.layers:
                x = LAYERS[way](x, layer, self.width).tanh()
            return self.head(x)

    plan = th.plan(Layers, INPUTS, size=Size(256, 1), base=BASE, lr=1.0)
    assert plan["layers.1.weight"].init.std == pytest.approx(1)
    assert plan["layers.1.weight"].lr == pytest.approx(1 / 4)


RMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "√n last": lambda x, g: F.normalize(x, dim=-1) * g * x.shape[-1] ** 0.5,
    "√n first": lambda x, g: F.normalize(x, dim=-1) * x.shape[-1] ** 0.5 * g,
    "√n below": lambda x, g: x / (x.norm(dim=-1, keepdim=True) * x.shape[-1] ** -0.5).clamp(min=1e-6) * g,
    "n below a sum": lambda x, g: x * (x.square().sum(-1, keepdim=True) / x.shape[-1] + 1e-6).rsqrt() * g,
    "a mean": lambda x, g: x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * g,
}


class Normed(nn.Module):
    """Branches behind a norm that is written by hand, and the same norm before the readout."""

    def __init__(self, width: int, depth: int, way: str) -> None:
        super().__init__()
        self.norm = RMS[way]
        self.embed, self.head = nn.Linear(8, width), nn.Linear(width, 3)
        self.gains = nn.ParameterList(nn.Parameter(torch.ones(width)) for _ in range(depth + 1))
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for gain, layer in zip(self.gains[:-1], self.layers, strict=True):
            x = x + layer(self.norm(x, gain))
        return self.head(self.norm(x, self.gains[-1]))


@pytest.mark.parametrize("way", RMS)
def test_the_numbers_of_a_norm_are_no_multipliers(way: str) -> None:
    anatomy = th.dissect(lambda width, depth: Normed(width, depth, way), INPUTS, size=Size(64, 2))
    assert [part.factor for part in anatomy.values()] == pytest.approx([1] * len(anatomy))
    assert [branch.placement for branch in anatomy.branches] == ["pre", "pre"]


def test_a_unit_vector_without_its_root_counts_as_a_number() -> None:
    RMS["a unit vector"] = lambda x, g: F.normalize(x, dim=-1) * g
    anatomy = th.dissect(lambda width, depth: Normed(width, depth, "a unit vector"), INPUTS, size=Size(64, 2))
    assert anatomy["gains.0"].factor == pytest.approx(1 / 8)
    assert anatomy["head.weight"].factor == pytest.approx(1 / 8)
    assert anatomy["gains.2"].factor == 1


BETWEEN: dict[str, tuple[Callable[[Any, Tensor, float], Tensor], str]] = {
    "behind a nonlinearity": (lambda net, x, c: net.b(F.gelu(net.a(x)) * c), "b"),
    "behind a homogeneous one": (lambda net, x, c: net.b(net.a(x).relu() * c), "a"),
    "behind a sum": (lambda net, x, c: net.b((net.a(x) + net.c(x)) * c), "b"),
    "before a sum": (lambda net, x, c: net.b(net.a(x) + net.c(x) * c), "c"),
    "behind a gate": (lambda net, x, c: net.b(F.silu(net.a(x)) * net.c(x) * c), "b"),
}


@pytest.mark.parametrize("way", BETWEEN)
def test_a_number_between_layers_counts_for_one_of_them(way: str) -> None:
    step, owner = BETWEEN[way]

    class Between(nn.Module):
        def __init__(self, width: int, depth: int) -> None:
            super().__init__()
            self.first, self.head = nn.Linear(8, width), nn.Linear(width, 3)
            self.a, self.b, self.c = (nn.Linear(width, width, bias=False) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x).tanh()
            return self.head(x + step(self, x, 0.25))

    anatomy = th.dissect(Between, INPUTS, size=Size(16, 1))
    counted = {name for name, part in anatomy.items() if part.factor == pytest.approx(0.25)}
    assert counted == {f"{owner}.weight"}


class Plain(nn.Module):
    """Neither norm nor stream: a number in front of the readout, one in front of the last nonlinearity."""

    def __init__(self, width: int, nonlinearity: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.nonlinearity = nonlinearity
        self.first, self.hidden = nn.Linear(8, width), nn.Linear(width, width)
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        width = self.hidden.out_features
        x = self.nonlinearity(self.hidden(self.first(x).relu()) * (width / 16) ** 0.5)
        return self.head(x * (16 / width))


@pytest.mark.parametrize("nonlinearity", [torch.relu, torch.tanh, F.leaky_relu, F.gelu])
def test_a_number_between_the_last_nonlinearity_and_the_readout_is_the_readouts(nonlinearity: Any) -> None:
    # As in mup's MuReadout: the readout has it, whether or not the nonlinearity lets it through.
    anatomy = th.dissect(lambda width, depth: Plain(width, nonlinearity), INPUTS, size=Size(64, 1))
    found = {name: part.factor for name, part in anatomy.items()}
    hidden = {"hidden.weight": 2.0, "hidden.bias": 2.0}
    first = {"first.weight": 1.0, "first.bias": 1.0}
    assert found == {**first, **hidden, "head.weight": 0.25, "head.bias": 1.0}
