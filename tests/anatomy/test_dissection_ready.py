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
