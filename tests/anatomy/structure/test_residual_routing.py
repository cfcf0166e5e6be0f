"""Branches of a network that mixes its history are found by dataflow, however the mixture is written."""

import dataclasses
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import theodolite as th
from theodolite.anatomy import dissect
from theodolite.core.size import Size
from theodolite.models import GPT
from theodolite.models.routing import Route
from theodolite.probes.scaling.activation_layout import record_activations

from ..hand import CLASSES, FEATURES, TOKENS, Block, attend, heads, mlp, vector

TOKEN_IDS = torch.zeros(1, 8, dtype=torch.long)


def scores_of(query, keys):
    return (keys @ query) / query.shape[0] ** 0.5


def by_einsum(query, values):
    v = torch.stack(values)
    weights = scores_of(query, F.rms_norm(v, v.shape[-1:])).softmax(0)
    return torch.einsum("nbt,nbtd->btd", weights, v)


def by_stack_and_sum(query, values):
    v = torch.stack(values, dim=-2)
    weights = scores_of(query, F.normalize(v, dim=-1)).softmax(-1)
    return (weights.unsqueeze(-1) * v).sum(-2)


def by_loop(query, values):
    scores = torch.stack([scores_of(query, F.rms_norm(v, v.shape[-1:])) for v in values], dim=-1)
    weights = scores.softmax(-1)
    return sum(weights[..., place, None] * v for place, v in enumerate(values))


def by_matrix_product(query, values):
    v = torch.stack(values, dim=-2)
    weights = scores_of(query, v).softmax(-1)
    return (weights.unsqueeze(-2) @ v).squeeze(-2)


MIXES = [by_einsum, by_stack_and_sum, by_loop, by_matrix_product]


class Mixing(nn.Module):
    """An MLP whose blocks read a mixture of all earlier values."""

    def __init__(self, width, depth, mix):
        super().__init__()
        self.embed = nn.Linear(FEATURES, width)
        self.blocks = nn.ModuleList(
            Block({**mlp(width), **({"ask": vector(width)} if place else {})}) for place in range(depth)
        )
        self.ask = vector(width)
        self.head = nn.Linear(width, CLASSES)
        self.mix = mix

    def forward(self, x):
        values = [self.embed(x)]
        for place, block in enumerate(self.blocks):
            h = self.mix(block.ask, values) if place else values[0]
            values.append(block.down(F.gelu(block.up(block.norm(h)))))
        return self.head(self.mix(self.ask, values))


def mixing(mix, depth=3):
    return dissect(lambda w, d: Mixing(w, d, mix), torch.zeros(2, TOKENS, FEATURES), size=Size(32, depth))


@pytest.mark.parametrize("mix", MIXES)
def test_branches_are_found_however_the_mixture_is_written(mix):
    anatomy = mixing(mix)
    assert [(b.block, b.branch, b.placement, b.layers, b.stream) for b in anatomy.branches] == [
        (0, 0, "pre", 2, 0),
        (1, 0, "pre", 2, 0),
        (2, 0, "pre", 2, 0),
    ]
    for number, branch in enumerate(anatomy.branches):
        names = {f"blocks.{number}.{name}" for name in ("norm.weight", "up.weight", "down.weight")}
        assert names <= set(branch.parts)
        assert f"blocks.{number}.down.weight" in branch.ends
    assert anatomy.grown_blocks == 6


@pytest.mark.parametrize("mix", MIXES)
def test_a_query_belongs_to_the_branch_that_reads_its_mixture(mix):
    anatomy = mixing(mix)
    places = {name: (part.block, part.branch) for name, part in anatomy.items() if name.endswith("ask")}
    assert places == {
        "blocks.1.ask": (1, 0),
        "blocks.2.ask": (2, 0),
        "ask": (None, None),
    }
    assert {anatomy[name].role for name in places} == {"output"}


class Conditioned(Mixing):
    """Every query is a vector and a linear map of a condition, which only queries read."""

    def __init__(self, width, depth):
        super().__init__(width, depth, by_loop)
        self.condition = nn.Linear(FEATURES, width)
        for block in [self, *self.blocks[1:]]:
            block.turn = nn.Linear(width, width, bias=False)

    def forward(self, x):
        condition = F.silu(self.condition(x.mean((0, 1))))
        values = [self.embed(x)]
        for place, block in enumerate(self.blocks):
            h = self.mix(block.ask + block.turn(condition), values) if place else values[0]
            values.append(block.down(F.gelu(block.up(block.norm(h)))))
        return self.head(self.mix(self.ask + self.turn(condition), values))


def test_what_makes_a_query_of_a_condition_belongs_to_the_branch_and_the_condition_to_none():
    anatomy = dissect(Conditioned, torch.zeros(2, TOKENS, FEATURES), size=Size(32, 3))
    places = {
        name: (part.block, part.role)
        for name, part in anatomy.items()
        if name.split(".")[-1] == "ask" or "turn" in name or "condition" in name
    }
    assert places == {
        "blocks.1.ask": (1, "bias"),
        "blocks.1.turn.weight": (1, "hidden"),
        "blocks.2.ask": (2, "bias"),
        "blocks.2.turn.weight": (2, "hidden"),
        "ask": (None, "bias"),
        "turn.weight": (None, "hidden"),
        "condition.weight": (None, "input"),
        "condition.bias": (None, "bias"),
    }


@pytest.mark.parametrize("mix", MIXES)
def test_mixtures_and_values_are_seen_however_they_are_written(mix):
    made = []

    def noted(query, values):
        made.append((mix(query, values), values[-1]))
        return made[-1][0]

    inputs = torch.randn(2, TOKENS, FEATURES)
    model = Mixing(32, 3, noted)
    model(inputs)
    mixed, values = zip(*made, strict=True)
    sight = record_activations(model, inputs)
    for found, expected in ((sight.stream, mixed), (sight.branches, values)):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)


class Towers(nn.Module):
    """Two histories, one of which begins with what came of the other."""

    def __init__(self, width, depth):
        super().__init__()
        self.left, self.right = Mixing(width, depth, by_loop), Mixing(width, depth, by_einsum)

    def forward(self, x):
        return self.right(x + torch.cat([self.left(x)] * (FEATURES // CLASSES), dim=-1))


def test_two_histories_are_two_streams():
    anatomy = dissect(Towers, torch.zeros(2, TOKENS, FEATURES), size=Size(32, 2))
    assert [(branch.stream, branch.layers, branch.ends[0].split(".")[0]) for branch in anatomy.branches] == [
        (0, 2, "left"),
        (0, 2, "left"),
        (1, 2, "right"),
        (1, 2, "right"),
    ]


def test_the_routed_gpt_has_the_branches_of_the_plain_one():
    for placement in ("pre", "peri"):
        build = partial(GPT, norm_placement=placement)
        plain = dissect(build, TOKEN_IDS, size=Size(32, 2))
        routed = dissect(partial(build, residual="routed"), TOKEN_IDS, size=Size(32, 2))
        for one, other in zip(plain.branches, routed.branches, strict=True):
            assert dataclasses.replace(other, parts=one.parts) == one
            assert set(other.parts) - set(one.parts) <= {f"{one.parts[0].split('.norm')[0]}.route.query"}
        for name, part in plain.items():  # a norm that reads a routed sum is beside its query
            assert dataclasses.replace(routed[name], beside=part.beside) == part


def _over_root(route, history):
    return by_loop(route.query, history.values)


def _rooted(width, depth):
    model = GPT(width, depth, residual="routed")
    for module in model.modules():
        if isinstance(module, Route):
            module.forward = partial(_over_root, module)
    return model


@pytest.mark.parametrize("ready", [False, True])
@pytest.mark.parametrize(("build", "factor"), [(partial(GPT, residual="routed"), 1 / 64), (_rooted, 1 / 8)])
def test_a_query_is_an_output_and_the_factor_of_its_scores_is_found(build, factor, ready):
    anatomy = dissect(build(64, 2), TOKEN_IDS) if ready else dissect(build, TOKEN_IDS, size=Size(64, 2))
    queries = [part for name, part in anatomy.items() if name.endswith("route.query")]
    assert [(part.block, part.branch) for part in queries] == [(0, 1), (1, 0), (1, 1), (None, None)]
    for part in queries:
        assert (part.role, part.fan_in, part.fan_out, part.factor) == ("output", 64, 1, factor)
        assert not part.ends_branch


def test_values_and_mixtures_are_seen():
    """Against the values that the blocks' hooks see."""
    model = GPT(32, 2, vocab=50, context=16, head_dim=16, residual="routed")
    for name, parameter in model.named_parameters():
        if name.endswith("route.query"):
            nn.init.normal_(parameter, std=2.0)
    routes, branches = [], []
    for name, module in model.named_modules():
        if name.endswith("route"):
            module.register_forward_hook(lambda _, __, made: routes.append(made))
        elif name.endswith(("attention", "feed_forward")):
            module.register_forward_hook(lambda _, __, made: branches.append(made.values[-1]))
    tokens = torch.randint(50, (2, 8))
    model(tokens)
    expected = [*routes], [*branches]
    sight = record_activations(model, tokens)
    assert sight.layout.is_routed
    assert sight.layout.places == ((0, 0), (0, 1), (1, 0), (1, 1))
    for found, true in zip((sight.stream, sight.branches), expected, strict=True):
        for one, other in zip(found, true, strict=True):
            torch.testing.assert_close(one, other)


# What is no mixture of a history


class Readout(nn.Module):
    """A plain stream, and a readout that mixes what it was after each block."""

    def __init__(self, width, depth):
        super().__init__()
        self.embed = nn.Linear(FEATURES, width)
        self.blocks = nn.ModuleList(Block(mlp(width)) for _ in range(depth))
        self.ask = vector(width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x):
        values = [self.embed(x)]
        for block in self.blocks:
            values.append(values[-1] + block.down(F.gelu(block.up(block.norm(values[-1])))))
        return self.head(by_einsum(self.ask, values))


def test_a_mixture_in_the_readout_leaves_the_residual_branches():
    anatomy = dissect(Readout, torch.zeros(2, TOKENS, FEATURES), size=Size(32, 3))
    assert [(b.block, b.placement, len(b.ends)) for b in anatomy.branches] == [
        (0, "pre", 2),
        (1, "pre", 2),
        (2, "pre", 2),
    ]
    assert not record_activations(Readout(32, 3), torch.zeros(2, TOKENS, FEATURES)).layout.is_routed


class SoftExperts(nn.Module):
    """Residual attention, then experts that are mixed by a softmax: both mix, neither a history."""

    def __init__(self, width, depth):
        super().__init__()
        self.embed = nn.Linear(FEATURES, width)
        self.blocks = nn.ModuleList(
            Block(
                {
                    "qkv": nn.Linear(width, 3 * width),
                    "out": nn.Linear(width, width),
                    "gate": nn.Linear(width, 3),
                }
                | {f"expert_{place}": nn.Linear(width, width) for place in range(3)}
                | {f"last_{place}": nn.Linear(width, width) for place in range(3)}
            )
            for _ in range(depth)
        )
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            q, k, v = (heads(part) for part in block.qkv(x).chunk(3, dim=-1))
            x = x + block.out(attend(q, k, v))
            weights = block.gate(x).softmax(-1)
            made = [
                getattr(block, f"last_{place}")(F.gelu(getattr(block, f"expert_{place}")(x)))
                for place in range(3)
            ]
            x = x + sum(weights[..., place, None] * one for place, one in enumerate(made))
        return self.head(x)


def test_attention_and_a_mixture_of_experts_are_none():
    anatomy = dissect(SoftExperts, torch.zeros(2, TOKENS, FEATURES), size=Size(32, 2))
    assert [(b.block, b.branch, b.layers) for b in anatomy.branches] == [
        (0, 0, 2),
        (0, 1, 2),
        (1, 0, 2),
        (1, 1, 2),
    ]


# What the plan makes of it


def test_the_plan_of_the_routed_network_is_the_plain_ones():
    """At the start both compute the same, so what depth asks of one it asks of the other."""
    size, base = Size(64, 4), Size(32, 2)
    plain, routed = (
        th.plan(partial(GPT, residual=residual), TOKEN_IDS, size=size, base=base, lr=2**-8, weight_decay=0.1)
        for residual in ("add", "routed")
    )
    for name, row in plain.rows.items():
        mine = routed.rows[name]
        assert (mine.lr, mine.weight_decay, mine.eps, mine.init) == (
            row.lr,
            row.weight_decay,
            row.eps,
            row.init,
        )


@pytest.mark.parametrize(("build", "power"), [(partial(GPT, residual="routed"), 1), (_rooted, 0.5)])
def test_a_step_moves_the_scores_as_far_at_every_width(build, power):
    """A sign of q has q·k/d ~ 1, and q·k/√d ~ √d: there the learning rate has to fall as 1/√d."""
    base = Size(64, 2)
    for width in (64, 256):
        plan = th.plan(build, TOKEN_IDS, size=Size(width, 2), base=base, lr=2**-8)
        for name in ("blocks.1.attention.route.query", "route.query"):
            moved = plan[name].lr * width / width**power  # along a key of ones
            assert moved == pytest.approx(2**-8 * 64 ** (1 - power))
            assert plan[name].init.kind == "constant"
