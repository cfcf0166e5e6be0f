"""Every reference model in every option: what `dissect` finds follows from the options.

The tables are derived from the description of each model, tensor by tensor, and not from what was printed.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch

from theodolite.anatomy import Anatomy, dissect
from theodolite.core.size import Size
from theodolite.models import GPT, DiT, FlowMLP, LeNet5, LeNet300, ResidualMLP, ResNet, ResNet4, UNet

PLACEMENTS = ("pre", "post", "peri", "out", "none")
VARIANTS = ("homogeneous", "bias", "residual", "layernorm", "all")


class Said(NamedTuple):
    """What a table says of one tensor."""

    op: str
    role: str
    norm: str | None = None
    block: int | None = None
    branch: int | None = None
    ends_branch: bool = False
    branch_layers: int | None = None
    tied: tuple[str, ...] = ()


def _found(anatomy: Anatomy) -> dict[str, Said]:
    return {
        part.name: Said(
            part.op,
            part.role,
            part.norm,
            part.block,
            part.branch,
            part.ends_branch,
            part.branch_layers,
            part.tied,
        )
        for part in anatomy.values()
    }


def _check(anatomy: Anatomy, table: dict[str, Said]) -> None:
    found = _found(anatomy)
    assert found.keys() == table.keys()
    wrong = [
        f"{name}: {found[name]}, should be {said}" for name, said in table.items() if found[name] != said
    ]
    assert not wrong, "\n" + "\n".join(wrong)


# GPT: two branches a block, attention and feed-forward, each of two layers.


def _gpt_table(depth: int, **options: Any) -> dict[str, Said]:
    placement, bias = options.get("norm_placement", "pre"), options.get("bias", False)
    shifts = bias and options.get("norm") == "layer"
    tied = options.get("tied", False)
    table: dict[str, Said] = {
        "embed.weight": Said("embedding", "input", tied=("readout.weight",) if tied else ())
    }
    if options.get("positions") == "learned":
        table["position.weight"] = Said("embedding", "input")

    def norm(name: str, role: str, **place: Any) -> None:
        table[f"{name}.weight"] = Said("norm", "gain", role, **place)
        if shifts:
            table[f"{name}.bias"] = Said("add", "bias", **place)

    for block in range(depth):
        for branch, limb in enumerate(("attention", "feed_forward")):
            prefix = f"blocks.{block}.{limb}"
            inside: dict[str, Any] = {"block": block, "branch": branch, "branch_layers": 2}
            by_norm = placement in ("peri", "out")
            last_stream_norm = block == depth - 1 and limb == "feed_forward"
            if placement in ("pre", "peri"):
                norm(f"{prefix}.norm_in", "input", **inside)
            if by_norm:
                norm(f"{prefix}.norm_out", "output", **inside, ends_branch=True)
            if placement == "post":
                # Every norm on the stream is read by the next addition; the last one by the readout alone.
                norm(f"{prefix}.norm_stream", "input" if last_stream_norm and not tied else "output")
            for weight, role, ends in _gpt_weights(limb, **options):
                ends = ends and not by_norm
                table[f"{prefix}.branch.{weight}"] = Said("linear", role, **inside, ends_branch=ends)
                if bias and weight.endswith(".weight") and not (options.get("experts") and branch == 1):
                    name = f"{prefix}.branch.{weight.removesuffix('weight')}bias"
                    table[name] = Said("add", "bias", **inside, ends_branch=ends)
            if limb == "attention" and options.get("qk_norm"):
                norm(f"{prefix}.branch.query_norm", "output", **inside)
                norm(f"{prefix}.branch.key_norm", "output", **inside)
    if placement not in ("post", "none"):
        norm("norm", "output" if tied else "input")
    if not tied:
        table["readout.weight"] = Said("linear", "output")
    return table


def _gpt_weights(limb: str, **options: Any) -> list[tuple[str, str, bool]]:
    """Name, role and whether it is the last: the keys of a fixed number of heads do not grow."""
    if limb == "attention":
        keys = "output" if options.get("kv_heads") else "hidden"
        return [
            ("query.weight", "hidden", False),
            ("key.weight", keys, False),
            ("value.weight", keys, False),
            ("out.weight", "hidden", True),
        ]
    suffix = "" if options.get("experts") else ".weight"
    weights = [(f"up{suffix}", "hidden", False), (f"down{suffix}", "hidden", True)]
    if options.get("gated"):
        weights.append((f"gate{suffix}", "hidden", False))
    if options.get("experts"):
        weights.append(("router.weight", "output", False))
    return weights


GPT_OPTIONS = [
    {},
    {"gated": True, "qk_norm": True, "bias": True},
    {"tied": True, "positions": "learned"},
    {"experts": 4, "gated": True, "kv_heads": 2},
    {"experts": 3, "bias": True, "tied": True, "qk_norm": True},
    {"bias": True, "kv_heads": 1, "scaled_init": True},
]


# Every placement with both norms alone, and with biases, of which RMSNorm has none; other options with two.
@pytest.mark.parametrize(
    "placement, norm, options",
    [
        *((placement, "layer", options) for placement in PLACEMENTS for options in GPT_OPTIONS[:2]),
        *((placement, "rms", GPT_OPTIONS[0]) for placement in PLACEMENTS),
        ("pre", "rms", GPT_OPTIONS[1]),
        *(
            (PLACEMENTS[(number + turn) % len(PLACEMENTS)], "layer", options)
            for number, options in enumerate(GPT_OPTIONS[2:])
            for turn in (0, 2)
        ),
    ],
    ids=lambda given: given if isinstance(given, str) else "-".join(given) or "plain",
)
def test_gpt(placement: str, norm: str, options: dict[str, Any]) -> None:
    options = {**options, "norm_placement": placement, "norm": norm}

    def build(width: int, depth: int) -> GPT:
        return GPT(width, depth, vocab=61, context=16, head_dim=8, **options)

    anatomy = dissect(build, torch.zeros(2, 8, dtype=torch.long), size=Size(32, 2))
    _check(anatomy, _gpt_table(2, **options))
    assert {branch.placement for branch in anatomy.branches} == {placement}
    assert anatomy.grown_blocks == 4
    for branch in anatomy.branches:
        if branch.branch == 1:
            assert branch.attention is None
            continue
        assert branch.attention is not None
        assert branch.attention.head_dim == 8
        assert not branch.attention.head_dim_grows
        assert branch.attention.scale == pytest.approx(8**-0.5)


# ResidualMLP: one branch a block, of `block_layers` weights.


@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ["relu", "linear"])
def test_residual_mlp(layers: int, bias: bool, activation: str) -> None:
    def build(width: int, depth: int) -> ResidualMLP:
        return ResidualMLP(
            width, depth, inputs=20, outputs=5, block_layers=layers, bias=bias, activation=activation
        )

    table = {"embed.weight": Said("linear", "input"), "readout.weight": Said("linear", "output")}
    for block, layer in itertools.product(range(3), range(layers)):
        table[f"blocks.{block}.layers.{layer}.weight"] = Said(
            "linear", "hidden", None, block, 0, layer == layers - 1, layers
        )
    _check(dissect(build, torch.zeros(4, 20), size=Size(32, 3)), _with_biases(table) if bias else table)


# The networks of the Goldilocks study. LeNets have no branch; ResNet4 has them if the variant says so.


@pytest.mark.parametrize("variant", ["homogeneous", "bias", "layernorm"])
def test_lenet300(variant: str) -> None:
    step = 3 if variant == "layernorm" else 2  # linear, (norm,) ReLU
    names = [f"layers.{1 + step * number}" for number in range(4)]
    table = _chain(names, ["linear"] * 4)
    if variant == "layernorm":
        table |= _norms([f"layers.{2 + step * number}" for number in range(3)])
    table = _with_biases(table) if variant == "bias" else table
    anatomy = dissect(lambda w, d: LeNet300(w, d, variant=variant), torch.zeros(2, 784), size=Size(30, 3))
    _check(anatomy, table)
    assert anatomy.branches == ()


@pytest.mark.parametrize("variant", ["homogeneous", "bias", "layernorm"])
def test_lenet5(variant: str) -> None:
    step = 4 if variant == "layernorm" else 3  # convolution, (norm,) ReLU, pooling
    after = 2 * step + 1  # flatten
    names = [
        "layers.0",
        f"layers.{step}",
        *(f"layers.{after + (step - 1) * number}" for number in range(3)),
    ]
    table = _chain(names, ["conv", "conv", "linear", "linear", "linear"])
    if variant == "layernorm":
        table |= _norms([name.split(".")[0] + f".{int(name.split('.')[1]) + 1}" for name in names[:-1]])
    table = _with_biases(table) if variant == "bias" else table
    anatomy = dissect(lambda w, d: LeNet5(w, d, variant=variant), torch.zeros(2, 3, 32, 32), size=Size(6, 2))
    _check(anatomy, table)
    assert anatomy.branches == ()


@pytest.mark.parametrize("variant", VARIANTS)
def test_resnet4(variant: str) -> None:
    residual, normed = variant in ("residual", "all"), variant in ("layernorm", "all")
    table = {"embed.1.weight": Said("linear", "input"), "readout.weight": Said("linear", "output")}
    if normed:
        # A ReLU reads the first norm; without a stream the readout or the next branch reads a branch's last.
        table |= _norms(["embed.2"])
    for block in range(2):
        second = 3 if normed else 2
        first_place = {"block": block, "branch": 0, "branch_layers": 2} if residual else {}
        ends = {"ends_branch": residual}
        table[f"blocks.{block}.0.weight"] = Said("linear", "hidden", **first_place)
        table[f"blocks.{block}.{second}.weight"] = Said(
            "linear", "hidden", **first_place, ends_branch=residual and not normed
        )
        if normed:
            table |= _norms([f"blocks.{block}.1"], **first_place)
            role = "output" if residual else "input"
            table |= _norms([f"blocks.{block}.{second + 1}"], role, **first_place, **ends)
    if variant in ("bias", "all"):
        table = _with_biases(table)
    anatomy = dissect(lambda w, d: ResNet4(w, d, variant=variant), torch.zeros(2, 784), size=Size(20, 2))
    _check(anatomy, table)
    assert anatomy.num_blocks == (2 if residual else 0)
    assert {branch.placement for branch in anatomy.branches} == (
        {"out" if normed else "none"} if residual else set()
    )


@pytest.mark.parametrize("norm", ["batch", "layer", "rms"])
def test_resnet(norm: str) -> None:
    table: dict[str, Said] = {
        "stem.weight": Said("conv", "input"),
        "readout.weight": Said("linear", "output"),
    }
    table["readout.bias"] = Said("add", "bias")
    norms = _norms(["stem_norm"])
    for block in range(6):
        inside = {"block": block, "branch": 0, "branch_layers": 2}
        table[f"blocks.{block}.first.weight"] = Said("conv", "hidden", **inside)
        table[f"blocks.{block}.second.weight"] = Said("conv", "hidden", **inside)
        norms |= _norms([f"blocks.{block}.first_norm"], **inside)
        norms |= _norms([f"blocks.{block}.second_norm"], **inside, ends_branch=True)
        if block in (2, 4):  # the first block of a stage
            table[f"blocks.{block}.shortcut.0.weight"] = Said("conv", "hidden")
            norms |= _norms([f"blocks.{block}.shortcut.1"])
    if norm == "rms":
        norms = {name: said for name, said in norms.items() if name.endswith("weight")}
    anatomy = dissect(lambda w, d: ResNet(w, d, norm=norm), torch.zeros(2, 3, 16, 16), size=Size(8, 2))
    _check(anatomy, table | norms)
    assert {branch.placement for branch in anatomy.branches} == {"out"}
    assert anatomy.grown_blocks == 12


# Networks of flows. Roles are those that the muP of diffusion transformers proves: what reads patches, times
# and labels is input, all layers that modulate are hidden, the last linear map is output.

IMAGES = (torch.zeros(2, 1, 8, 8), torch.tensor([0.2, 0.7]), torch.tensor([0, 10]))
CONDITION = {
    "condition.time_in.weight": Said("linear", "input"),
    "condition.time_out.weight": Said("linear", "hidden"),
}
LABEL = {"condition.label.weight": Said("embedding", "input")}


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("residual", ["add", "routed", "time-routed"])
@pytest.mark.parametrize("modulation", ["zero", "random"])
def test_dit(modulation: str, residual: str, times: int) -> None:
    table = {"embed.weight": Said("linear", "input"), "modulation.weight": Said("linear", "hidden")}
    table |= CONDITION | {"readout.weight": Said("linear", "output")}
    plain: dict[str, Said] = dict(LABEL)
    for block, (branch, limb) in itertools.product(range(2), enumerate(("attention", "feed_forward"))):
        prefix, inside = (
            f"blocks.{block}.{limb}",
            {"block": block, "branch": branch, "branch_layers": 2},
        )
        table[f"{prefix}.modulation.weight"] = Said("linear", "hidden", **inside)
        first, last = (("query", "key", "value"), "out") if limb == "attention" else (("up",), "down")
        for name in first:
            plain[f"{prefix}.branch.{name}.weight"] = Said("linear", "hidden", **inside)
        plain[f"{prefix}.branch.{last}.weight"] = Said("linear", "hidden", **inside, ends_branch=True)
        if (block, branch) != (0, 0):
            plain |= _route(f"{prefix}.route", residual, **inside)
    plain |= _route("route", residual)
    build = partial(DiT, side=8, patch=2, head_dim=16, modulation=modulation, residual=residual, times=times)
    anatomy = dissect(build, IMAGES, size=Size(32, 2))
    _check(anatomy, _with_biases(table) | plain)
    assert anatomy.grown_blocks == 4


def _route(name: str, residual: str, **place: Any) -> dict[str, Said]:
    """A constant query is read by keys alone; one that depends on a condition is the bias of a layer."""
    if residual == "add":
        return {}
    if residual == "routed":
        return {f"{name}.query": Said("linear", "output", **place)}
    return {
        f"{name}.query": Said("add", "bias", **place),
        f"{name}.shift": Said("linear", "hidden", **place),
    }


@pytest.mark.parametrize("classes", [0, 3])
def test_flow_mlp(classes: int) -> None:
    table = {"enter.weight": Said("linear", "input"), "readout.weight": Said("linear", "output")} | CONDITION
    gains: dict[str, Said] = {"norm.weight": Said("norm", "gain", "input")} | (LABEL if classes else {})
    for block in range(2):
        inside: dict[str, Any] = {"block": block, "branch": 0, "branch_layers": 2}
        table[f"blocks.{block}.up.weight"] = Said("linear", "hidden", **inside)
        table[f"blocks.{block}.down.weight"] = Said("linear", "hidden", **inside, ends_branch=True)
        gains[f"blocks.{block}.norm.weight"] = Said("norm", "gain", "input", **inside)
    inputs = (torch.zeros(2, 2), torch.tensor([0.2, 0.7]), *([torch.tensor([0, 3])] if classes else []))
    anatomy = dissect(partial(FlowMLP, classes=classes), inputs, size=Size(16, 2))
    _check(anatomy, _with_biases(table) | gains)
    assert {branch.placement for branch in anatomy.branches} == {"pre"}


def test_unet() -> None:
    table = {"enter.weight": Said("conv", "input"), "readout.weight": Said("conv", "output")} | CONDITION
    for name in ("shrink.0", "grow.0", "merge.0", "merge.1"):
        table[f"{name}.weight"] = Said("conv", "hidden")
    others = LABEL | _norms(["norm"])
    # In the order of the pass: down the levels, the middle, and up again.
    for block, name in enumerate(("down.0.0", "down.1.0", "middle.0", "", "middle.1", "up.1.0", "up.0.0")):
        inside: dict[str, Any] = {"block": block, "branch": 0, "branch_layers": 2}
        if not name:
            for weight in ("query", "key", "value"):
                others[f"attention.attention.{weight}.weight"] = Said("linear", "hidden", **inside)
            others["attention.attention.out.weight"] = Said("linear", "hidden", **inside, ends_branch=True)
            others |= _norms(["attention.norm"], "input", **inside)
            continue
        table[f"{name}.conv_in.weight"] = Said("conv", "hidden", **inside)
        table[f"{name}.conv_out.weight"] = Said("conv", "hidden", **inside, ends_branch=True)
        table[f"{name}.condition.weight"] = Said("linear", "hidden", **inside)
        others |= _norms([f"{name}.norm_in", f"{name}.norm_out"], **inside)
    _check(dissect(partial(UNet, head_dim=16), IMAGES, size=Size(16, 1)), _with_biases(table) | others)


def _chain(names: list[str], ops: list[str]) -> dict[str, Said]:
    roles = ["input", *["hidden"] * (len(names) - 2), "output"]
    return {f"{name}.weight": Said(op, role) for name, op, role in zip(names, ops, roles, strict=True)}


def _norms(names: list[str], role: str = "output", **place: Any) -> dict[str, Said]:
    """Gains and shifts of norms; an activation reads them unless said otherwise."""
    gains = {f"{name}.weight": Said("norm", "gain", role, **place) for name in names}
    return gains | {f"{name}.bias": Said("add", "bias", **place) for name in names}


def _with_biases(table: dict[str, Said]) -> dict[str, Said]:
    """A bias beside every weight, at the weight's place."""
    biases = {
        f"{name.removesuffix('weight')}bias": said._replace(op="add", role="bias")
        for name, said in table.items()
        if said.op in ("linear", "conv")
    }
    return table | biases
