"""What cannot be done without changing the network is refused by name, and nothing is changed."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from theodolite import UseError
from theodolite.models import GPT
from theodolite.surgery import SurgeryError, convert, fold, remove_gains, scale_vectors
from theodolite.surgery.vectors import ScaledWeight

from .hand import INPUTS, WIDTH, Hand, plain
from .networks import TOKENS, apart, gradients, logits, network
from .test_folding import skeleton


def _no_norms() -> nn.Module:
    return GPT(32, 1, vocab=64, head_dim=16, norm_placement="none")


def _no_gains() -> nn.Module:
    return Hand(plain, norm=nn.RMSNorm(WIDTH, elementwise_affine=False))


@pytest.mark.parametrize("operate", [scale_vectors, convert])
@pytest.mark.parametrize(("make", "inputs"), [(_no_norms, TOKENS), (_no_gains, INPUTS)])
def test_without_gains_there_is_nothing_to_do(
    operate: Any, make: Callable[[], nn.Module], inputs: Tensor
) -> None:
    with pytest.raises(SurgeryError, match="nothing to do: it has no norms with gains"):
        operate(make(), inputs)
    with pytest.raises(SurgeryError, match="nothing to fold: it has no norms with gains"):
        fold(make(), inputs)
    with pytest.raises(SurgeryError, match="nothing to remove: the network has no norms with gains"):
        remove_gains(make(), inputs)


def _twice(block: Any, x: Tensor) -> Tensor:
    y = plain(block, x)
    made: Tensor = y + block.out(block.other(y))
    return made


def _two_norms() -> nn.Module:
    one, other = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
    other.weight = one.weight
    return Hand(_twice, norm=one, other=other, out=nn.Linear(WIDTH, WIDTH))


def _frozen() -> nn.Module:
    model = Hand(plain)
    model.norm.weight.requires_grad_(False)  # type: ignore[union-attr, operator]
    return model


def _weight_normed() -> nn.Module:
    return Hand(plain, up=parametrizations.weight_norm(nn.Linear(WIDTH, 2 * WIDTH)))


def _shared_map() -> nn.Module:
    def step(block: Any, x: Tensor) -> Tensor:
        made: Tensor = block.down(block.up(block.norm(x)).relu() + block.up(x))
        return made

    return Hand(step)


def _constant_added() -> nn.Module:
    def step(block: Any, x: Tensor) -> Tensor:
        made: Tensor = block.down(block.up(block.norm(x) + 1.0).relu())
        return made

    return Hand(step)


def _bent() -> nn.Module:
    def step(block: Any, x: Tensor) -> Tensor:
        made: Tensor = block.down(block.up(block.norm(x).relu()))
        return made

    return Hand(step)


def _no_bias() -> nn.Module:
    return Hand(plain, norm=nn.LayerNorm(WIDTH), up=nn.Linear(WIDTH, 2 * WIDTH, bias=False))


def _masked() -> nn.Module:
    def step(block: Any, x: Tensor) -> Tensor:
        kept = torch.tensor([True, True, False, True, False])[:, None]
        made: Tensor = block.down(block.up(block.norm(x) * kept).relu())
        return made

    return Hand(step, norm=nn.LayerNorm(WIDTH))


def _read_twice() -> nn.Module:
    def step(block: Any, x: Tensor) -> Tensor:
        both = block.up(block.norm(x) + block.other(x.flip(1)))
        made: Tensor = block.down(both.relu())
        return made

    return Hand(step, other=nn.RMSNorm(WIDTH))


class _Exponential(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.log = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (WIDTH,), self.log.exp())


class _Standardised(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, (self.weight - self.weight.mean()) / self.weight.std(), self.bias)


def _exponential() -> nn.Module:
    return Hand(plain, norm=_Exponential())


def _standardised() -> nn.Module:
    return Hand(plain, up=_Standardised(WIDTH, 2 * WIDTH))


def _over_two_dimensions() -> nn.Module:
    return Hand(plain, norm=nn.LayerNorm((5, WIDTH), bias=False))


def _padded() -> nn.Module:
    def step(block: Any, x: Tensor) -> Tensor:
        made: Tensor = block.down(block.conv(block.norm(x).mT).mT.relu())
        return made

    return Hand(step, norm=nn.LayerNorm(WIDTH), conv=nn.Conv1d(WIDTH, 2 * WIDTH, 3, padding=1))


LEFT: dict[Callable[[], nn.Module], str] = {
    _exponential: "norm.log: it is not a norm's gain as it is",
    _standardised: "norm.weight: up.weight, which reads it, is not a weight as it is",
    _over_two_dimensions: "norm.weight: it has 40 entries, but 8 channels are read",
    _padded: "norm.weight: conv.weight meets zeros at the borders, where the norm's shift norm.bias is not",
    _two_norms: "norm.weight: it is shared by norm.weight and other.weight",
    _frozen: "norm.weight: it is frozen (requires_grad is False)",
    _weight_normed: "original1, which reads it, is not a weight as it is",
    _shared_map: "norm.weight: up.weight, which reads it, reads something else too",
    _constant_added: "norm.weight: a constant is added to it",
    _bent: "norm.weight: it reaches a nonlinearity, relu",
    _no_bias: "norm.weight: up.weight has no bias that could take up the norm's shift norm.bias",
    _masked: "norm.weight: the norm's shift norm.bias is multiplied or masked before it is read",
    _read_twice: "norm.weight: it reaches the residual stream or another sum",
}


@pytest.mark.parametrize("make", LEFT, ids=lambda make: make.__name__.strip("_"))
def test_a_gain_that_cannot_be_moved_is_named_with_the_reason(make: Callable[[], nn.Module]) -> None:
    model = make()
    shape = skeleton(model)
    with pytest.raises(SurgeryError) as caught:
        scale_vectors(model, INPUTS)
    assert LEFT[make] in str(caught.value)
    assert re.match("nothing to do: (none of its|its only gain could not)", str(caught.value))
    assert skeleton(model) == shape


def test_the_shift_of_a_norm_is_left_where_two_maps_share_a_bias() -> None:
    def step(block: Any, x: Tensor) -> Tensor:
        n = block.norm(x)
        made: Tensor = block.down((block.a(n) + block.b(n) + block.c).relu())
        return made

    maps = {name: nn.Linear(WIDTH, 2 * WIDTH, bias=False) for name in "ab"}
    model = Hand(step, norm=nn.LayerNorm(WIDTH), c=nn.Parameter(torch.zeros(2 * WIDTH)), **maps)
    before = logits(model, INPUTS).detach()
    with pytest.raises(SurgeryError, match=r"a\.weight has no bias that could take up"):
        convert(model, INPUTS)
    assert torch.equal(logits(model, INPUTS), before)


def test_a_bias_in_another_order_is_not_taken_for_the_maps_own() -> None:
    def step(block: Any, x: Tensor) -> Tensor:
        turned = block.up(block.norm(x)).unflatten(-1, (2, WIDTH)).transpose(-1, -2).flatten(-2)
        made: Tensor = block.down((turned + block.c).relu())
        return made

    up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
    model = Hand(step, norm=nn.LayerNorm(WIDTH), up=up, c=nn.Parameter(torch.zeros(2 * WIDTH)))
    before = logits(model, INPUTS).detach()
    with pytest.raises(SurgeryError, match=r"up\.weight has no bias that could take up"):
        convert(model, INPUTS)
    assert torch.equal(logits(model, INPUTS), before)


# What may stand between a norm and a map.


def _padded(block: Any, x: Tensor) -> Tensor:
    made: Tensor = block.down(block.up(nn.functional.pad(block.norm(x), (0, 0, 1, 0))).relu()[:, 1:])
    return made


def _gated(block: Any, x: Tensor) -> Tensor:
    made: Tensor = block.down(block.up(block.norm(x) * block.gate(x).sigmoid()).relu())
    return made


def _beside(block: Any, x: Tensor) -> Tensor:
    made: Tensor = block.down(block.wide(torch.cat((x, block.norm(x)), -1)).relu())
    return made


@pytest.mark.parametrize("step", [_padded, _gated, _beside], ids=lambda one: one.__name__.strip("_"))
def test_what_leaves_channels_apart_may_stand_between(step: Callable[[Any, Tensor], Tensor]) -> None:
    parts = {"gate": nn.Linear(WIDTH, WIDTH), "wide": nn.Linear(2 * WIDTH, 2 * WIDTH)}
    model = Hand(step, **parts)
    plain_one = copy.deepcopy(model)
    before, _ = gradients(model, INPUTS)
    model, proof = scale_vectors(model, INPUTS)
    assert proof.moved == ("norm.weight",)
    assert apart(logits(model, INPUTS).detach(), before) < 1e-13
    model, _ = fold(model, INPUTS)
    name = "wide" if step is _beside else "up"
    gain = plain_one.norm.weight
    gain = torch.cat((torch.ones_like(gain), gain)) if step is _beside else gain
    made = model.get_parameter(f"{name}.weight")
    assert torch.allclose(made, plain_one.get_parameter(f"{name}.weight") * gain, rtol=1e-13)


def test_the_norm_of_values_goes_into_the_map_after_attention() -> None:
    """Its gain has one head's channels, and W_o reads it once for each head."""

    def step(block: Any, x: Tensor) -> Tensor:
        heads = [one(x).unflatten(-1, (2, 4)).transpose(1, 2) for one in (block.q, block.k, block.v)]
        mixed = nn.functional.scaled_dot_product_attention(heads[0], heads[1], block.norm(heads[2]))
        made: Tensor = block.out(mixed.transpose(1, 2).flatten(2))
        return made

    maps = {name: nn.Linear(WIDTH, WIDTH) for name in ("q", "k", "v", "out")}
    model = Hand(step, norm=nn.RMSNorm(4), **maps)
    weight, gain = model.out.weight.detach().clone(), model.norm.weight.detach().clone()
    before = logits(model, INPUTS).detach()
    model, _ = scale_vectors(model, INPUTS)
    (vector,) = next(one for one in model.modules() if isinstance(one, ScaledWeight)).inputs
    assert torch.allclose(vector(), gain.repeat(2))
    model, _ = fold(model, INPUTS)
    assert torch.allclose(model.out.weight, weight * gain.repeat(2), rtol=1e-13)
    assert apart(logits(model, INPUTS).detach(), before) < 1e-13


# Wrong arguments.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"placement": "left"}, "placement is 'left'. It is one of input, output, both"),
        (
            {"reparameterization": "log"},
            "reparameterization is 'log'. It is one of direction, product, exp, None",
        ),
        ({"reparameterization": "plain"}, "reparameterization is 'plain'"),
        (
            {"heterogeneous": False, "placement": "input", "reparameterization": None},
            "is what the network has already",
        ),
        ({"gains": ["nothing*"]}, "no norm's gain has a name that matches 'nothing\\*'"),
        ({"gains": "norm.weight"}, r"give a list of patterns, gains=\['norm.weight'\]"),
        ({"gains": ["*norm*"]}, "^norm.weight: embed.weight, which reads it, is an embedding too"),
    ],
)
def test_wrong_arguments_are_named(options: dict[str, Any], message: str) -> None:
    model = network("gpt tied")
    shape = skeleton(model)
    with pytest.raises(UseError, match=message):
        scale_vectors(model, TOKENS, **options)
    assert skeleton(model) == shape


def test_a_tied_head_is_named_when_it_is_to_be_folded() -> None:
    with pytest.raises(SurgeryError, match=r"^norm\.weight: embed\.weight, which reads it, is an embedding"):
        fold(network("gpt tied"), TOKENS, gains=["*norm*"])


def test_vectors_are_not_put_in_twice() -> None:
    model = convert(network("gpt"), TOKENS)
    shape = skeleton(model)
    with pytest.raises(SurgeryError, match="the network's weights have scale vectors already"):
        scale_vectors(model, TOKENS)
    assert skeleton(model) == shape


def test_a_gain_of_zeros_has_no_direction() -> None:
    model = Hand(plain)
    nn.init.zeros_(model.norm.weight)  # type: ignore[arg-type]
    with pytest.raises(SurgeryError, match=r"norm\.weight is zero, which has no direction: use reparam"):
        scale_vectors(model, INPUTS)
    before = logits(model, INPUTS).detach()
    model, _ = scale_vectors(model, INPUTS, reparameterization="product")
    assert torch.equal(logits(model, INPUTS), before)


def test_output_norms_have_to_be_one_to_be_removed() -> None:
    model = network("gpt peri")
    with pytest.raises(SurgeryError, match=r"norm_out.weight is not one everywhere and cannot be folded"):
        remove_gains(model, TOKENS)


def test_what_else_a_network_returns_counts_as_output() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Hand(plain)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"logits": self.inner(x), "hidden": self.inner.norm(self.inner.embed(x))}

    with pytest.raises(SurgeryError, match=r"inner\.norm\.weight: it reaches the network's output"):
        scale_vectors(Both(), INPUTS)


def test_a_frozen_gain_that_is_named_is_an_error() -> None:
    model = Hand(plain)
    model.norm.weight.requires_grad_(False)
    with pytest.raises(SurgeryError, match=r"norm\.weight: it is frozen"):
        scale_vectors(model, INPUTS, gains=["norm.weight"])
