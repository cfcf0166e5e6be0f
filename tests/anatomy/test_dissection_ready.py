"""From a ready module alone, with nothing to compare widths with, the common networks come out the same."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from theodolite.anatomy import dissect
from theodolite.core.size import Size
from theodolite.models import GPT, ResNet

from .golden import GOLDENS

# Left out are networks with tables looked up in a branch, depthwise convolutions and a fixed number of key
# heads: whether their fans grow is not in the dataflow of one network.
SAME = [
    "gpt2",
    "llama",
    "llama-eager",
    "qwen3",
    "gemma2",
    "olmo2",
    "mixtral",
    "qwen3-moe",
    "gpt-neox",
    "vit",
    "bert",
    "resnet",
    "resnet-preactivation",
    "torch-encoder-pre",
    "torch-encoder-post",
]
# What two widths tell and one cannot, and what is not in the tables.
NOT_COMPARED = {"width_in", "width_out", "grown_axes", "uses", "beside", "assumed"}


@pytest.mark.parametrize("name", SAME)
def test_a_ready_module_has_the_anatomy_that_its_source_says(name: str) -> None:
    pytest.importorskip("transformers")
    golden = GOLDENS[name]
    width, depth = golden.size.width, golden.size.depth
    anatomy = dissect(golden.build(width, depth), golden.inputs())
    expected = golden.table(width, depth).parts()
    assert anatomy.size is None
    assert anatomy.grown_blocks is None
    assert sorted(anatomy) == sorted(expected)
    wrong = [
        f"{part.name}.{field.name}: {getattr(anatomy[part.name], field.name)!r}, by the source {value!r}"
        for part in expected.values()
        for field in dataclasses.fields(part)
        if field.name not in NOT_COMPARED
        and (value := getattr(part, field.name)) != getattr(anatomy[part.name], field.name)
    ]
    assert not wrong, "\n" + "\n".join(wrong)


@pytest.mark.parametrize(
    "options",
    [{}, {"tied": True, "norm_placement": "peri"}, {"experts": 3, "gated": True}, {"norm_placement": "post"}],
    ids=str,
)
def test_a_gpt_looks_the_same_with_and_without_other_widths(options: dict[str, Any]) -> None:
    def build(width: int, depth: int) -> GPT:
        return GPT(width, depth, vocab=61, context=16, head_dim=8, **options)

    tokens = torch.zeros(2, 8, dtype=torch.long)
    assert dict(dissect(build(32, 2), tokens)) == dict(dissect(build, tokens, size=Size(32, 2)))


def test_a_resnet_looks_the_same_with_and_without_other_widths() -> None:
    images = torch.zeros(2, 3, 16, 16)
    assert dict(dissect(ResNet(8, 2), images)) == dict(dissect(ResNet, images, size=Size(8, 2)))


def test_the_callers_word_on_an_unused_tensor_of_a_ready_module() -> None:
    model = GPT(32, 1, vocab=61, context=16, head_dim=8)
    model.spare = torch.nn.Parameter(torch.zeros(7, 32))
    part = dissect(model, torch.zeros(2, 8, dtype=torch.long), roles={"spare": "hidden"})["spare"]
    assert (part.role, part.op, part.fan_in, part.fan_out) == ("hidden", "unseen", 32, 7)


def _on_meta(*parts: str) -> Any:
    def place(model: GPT) -> GPT:
        for part in parts:
            model.get_submodule(part).to("meta")
        return model

    return place


@pytest.mark.parametrize(
    "place",
    [
        lambda model: model.bfloat16(),
        lambda model: model.half().train(),
        _on_meta(""),
        _on_meta("readout"),
        _on_meta("blocks.0", "embed"),
    ],
    ids=["bfloat16", "half", "meta", "readout on meta", "half on meta"],
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_dtype_and_device_of_a_ready_module_change_nothing(place: Any, device: str) -> None:
    def fresh() -> GPT:
        return GPT(32, 2, vocab=61, context=16, head_dim=8, norm_placement="peri")

    model = place(fresh())
    before = {name: (id(one), one.device, one.dtype) for name, one in model.named_parameters()}
    found = dict(dissect(model, torch.zeros(2, 8, dtype=torch.long, device=device)))
    assert found == dict(dissect(fresh(), torch.zeros(2, 8, dtype=torch.long)))
    assert {name: (id(one), one.device, one.dtype) for name, one in model.named_parameters()} == before
    assert all(one.grad is None for one in model.parameters())


def test_integer_weights_are_frozen_and_what_is_added_to_them_is_not() -> None:
    class Adapted(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.leave = torch.nn.Linear(8, 64), torch.nn.Linear(64, 2)
            self.codes = torch.nn.Parameter(torch.ones(64, 64, dtype=torch.int8), requires_grad=False)
            self.register_buffer("scale", torch.ones(64, 1))
            self.down = torch.nn.Linear(64, 4, bias=False)
            self.up = torch.nn.Linear(4, 64, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.enter(x)
            return self.leave(torch.relu(h @ (self.codes * self.scale).T + self.up(self.down(h))))

    anatomy = dissect(Adapted(), torch.zeros(2, 8))
    roles = {name: part.role for name, part in anatomy.items() if part.role != "bias"}
    assert roles == {
        "codes": "frozen",
        "enter.weight": "input",
        "leave.weight": "output",
        "down.weight": "output",
        "up.weight": "input",
    }


class Derivatives(torch.nn.Module):
    """A field and its derivative by the place, taken with the autograd of the caller."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(2, 16),
            torch.nn.Tanh(),
            torch.nn.Linear(16, 16),
            torch.nn.Tanh(),
            torch.nn.Linear(16, 1),
        )

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x.requires_grad_()
        energy = self.layers(x)
        (slope,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return {"energy": energy, "forces": -slope}


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_network_that_takes_derivatives_needs_no_autograd_of_its_own(device: str) -> None:
    model, places = Derivatives().to(device), torch.zeros(3, 2)
    with torch.no_grad():
        anatomy = dissect(model, places)
    roles = [part.role for name, part in anatomy.items() if name.endswith("weight")]
    assert roles == ["input", "hidden", "output"]
    assert not places.requires_grad
    assert all(one.grad is None for one in model.parameters())
