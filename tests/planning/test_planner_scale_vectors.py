"""Plans for networks with scale vectors inside their weights."""

from __future__ import annotations

import re
from functools import cache, partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import theodolite as th
from theodolite.core.size import Size
from theodolite.models import GPT
from theodolite.planning import Plan
from theodolite.planning.init_reading import read_init, read_without_values

from ..anatomy.scaled import FORMS, retire, scale, scaled_gpt

pytestmark = pytest.mark.usefixtures("one_dissection")
TOKENS = torch.zeros(1, 8, dtype=torch.long)
BASE, WIDE, DEEP, LARGE = Size(32, 1), Size(128, 1), Size(32, 2), Size(64, 2)


def build(width: int, depth: int, form: str | None, **options: object) -> nn.Module:
    model = GPT(width, depth, head_dim=16, vocab=48, **options)  # type: ignore[arg-type]
    return scaled_gpt(model, form) if form else model


@cache
def anatomy(form: str | None, size: Size, **options: object) -> th.Anatomy:
    return th.dissect(partial(build, form=form, **options), TOKENS, size=size)


def planned(form: str | None, size: Size, optimizer: str = "adamw", **options: object) -> Plan:
    make = partial(build, form=form, **options)
    known = {one: anatomy(form, one, **options) for one in (size, BASE)}
    return th.plan(
        make, TOKENS, size=size, base=BASE, optimizer=optimizer, lr=2**-6, weight_decay=0.125, anatomies=known
    )


def plain_name(name: str) -> str:
    return re.sub(r"parametrizations\.(\w+)\.original$", r"\1", name)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "lion", "muon-kimi"])
@pytest.mark.parametrize("form", ["plain", "direction"])
def test_weights_are_planned_as_without_vectors_and_vectors_as_the_gain_was(
    form: str, optimizer: str
) -> None:
    with_vectors, without = (planned(one, LARGE, optimizer) for one in (form, None))
    of_input = without["blocks.1.attention.norm_in.weight"]
    of_last = without["norm.weight"]
    for name, row in with_vectors.rows.items():
        if plain_name(name) in without.rows:
            old = without[plain_name(name)]
            kept = (row.rule, row.init, row.lr, row.weight_decay, row.eps, row.extent)
            assert kept == (old.rule, old.init, old.lr, old.weight_decay, old.eps, old.extent), name
        elif "gammas" in name and name.endswith("alpha"):
            old = of_last if name.startswith("readout") else of_input
            decay = 0.0 if form == "direction" else old.weight_decay
            assert (row.rule, row.lr, row.eps) == (old.rule, old.lr, old.eps), name
            assert (row.init, row.weight_decay) == (old.init, decay), name


def test_a_magnitude_follows_the_rule_of_a_vector_of_one_entry() -> None:
    """formulas.md, section 1, with r_out = 1: SGD r_L, Adam 1 and eps 1/r_L; outside of the blocks 1."""
    for optimizer, lr, eps in (("sgd", 2.0, 1.0), ("adamw", 1.0, 1 / 2)):
        made = planned("direction", LARGE, optimizer)
        row = made["blocks.0.feed_forward.branch.up.parametrizations.weight.0.b.beta"]
        assert (row.lr, row.eps) == (lr * 2**-6, eps * made.eps)
        assert row.weight_decay == 0.125 / lr  # it decays: only the linear map reads it
        row = made["readout.parametrizations.weight.0.b.beta"]
        assert (row.lr, row.eps, row.weight_decay) == (2**-6, made.eps, 0.125)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "muon-kimi"])
def test_at_base_size_the_plan_is_the_plain_optimizer(optimizer: str) -> None:
    made = planned("direction", BASE, optimizer)
    assert {row.lr for row in made.rows.values()} == {2**-6}
    scale_free = {name for name, part in anatomy("direction", BASE).items() if part.scale_free}
    assert {name for name, row in made.rows.items() if row.weight_decay == 0} == scale_free
    assert len(scale_free) == sum(name.endswith("alpha") for name in made.rows)


def test_stacks_of_vectors_are_no_matrices() -> None:
    made = planned("product", WIDE, "muon-kimi", experts=2)
    prefix = "blocks.0.feed_forward.branch.parametrizations.up"
    assert made[f"{prefix}.original"].rule == "muon-kimi"
    for name in ("gammas.0.alpha", "gammas.0.beta", "b.alpha", "b.beta"):
        row = made[f"{prefix}.0.{name}"]
        assert len(row.shape) == 2
        assert (row.rule, row.lr, row.weight_decay) == ("adamw", 2**-6, 0.125)


@pytest.mark.parametrize("form", ["direction", "product"])
def test_a_branch_that_a_norm_in_two_pieces_ends_shrinks_once(form: str) -> None:
    """At twice the depth the gain that ends a branch starts at a half, whatever it is made of."""
    made = planned(form, DEEP, norm_placement="peri")
    norm = made.build(seed=0).blocks[0].attention.norm_out  # type: ignore[union-attr, index]
    torch.testing.assert_close(norm.weight, torch.full((32,), 0.5))
    decays = [row.weight_decay for name, row in made.rows.items() if "norm_out" in name]
    assert len(decays) == 2 * 2 * 2
    assert not any(decays)  # it reaches the stream


class OneLayer(nn.Module):
    """Branches of one layer, whose weight reads a norm."""

    def __init__(self, width: int, depth: int, form: str | None) -> None:
        super().__init__()
        self.embed = nn.Linear(3, width)
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(depth))
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(depth))
        self.head = nn.Linear(width, 5)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            if form:
                scale(layer, "weight", norm, form)
                retire(norm)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x))
        return self.head(x)


@pytest.mark.parametrize("form", FORMS)
def test_the_weight_carries_the_multiplier_of_its_branch_and_the_vectors_do_not(form: str) -> None:
    models = []
    for one in (form, None):
        made = th.plan(
            partial(OneLayer, form=one), torch.zeros(2, 3), size=Size(16, 8), base=Size(16, 2), lr=0.25
        )
        models.append(made.build(seed=0))
    weights = [model.layers[0].weight for model in models]  # type: ignore[union-attr, index]
    assert weights[0].std().item() == pytest.approx(16**-0.5 / 3**0.5 / 2, rel=0.2)  # 1/√r_L of torch's own
    torch.testing.assert_close(weights[0], weights[1])


@pytest.mark.parametrize("form", FORMS)
def test_the_network_starts_as_it_would_without_vectors(form: str) -> None:
    """Also at another size, and in the same numbers: the vectors are ones, in whatever form."""
    tokens = torch.randint(48, (2, 8))
    logits = [planned(one, WIDE).build(seed=3)(tokens) for one in (form, None)]
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_laws_are_read_off_a_network_that_is_too_large_to_build(form: str) -> None:
    make = partial(build, form=form, norm_placement="peri")
    hollow, real = read_without_values(make, BASE), read_init(make, BASE)
    assert hollow == real
    assert {law.kind for law in real.values()} == {"constant", "normal"}


def test_vectors_move_the_loss_as_the_gains_of_norms_do_at_every_width_and_depth() -> None:
    """To first order a step of SGD moves it by Σ lr·‖∇‖², one of AdamW by Σ lr·‖∇‖₁; so for γ and for b."""
    tokens = torch.randint(48, (4, 17), generator=torch.Generator().manual_seed(0))

    @cache
    def moved(form: str | None, endings: tuple[str, ...], optimizer: str, size: Size) -> list[float]:
        made, sums = planned(form, size, optimizer), torch.zeros(len(endings), 3)
        for seed in range(3):
            model = made.build(seed)
            F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
            for name, tensor in model.named_parameters():
                for which, ending in enumerate(endings):
                    if name.startswith("blocks") and name.endswith(ending):
                        assert tensor.grad is not None
                        power = 2 if optimizer == "sgd" else 1
                        sums[which, seed] += made[name].lr * tensor.grad.abs().pow(power).sum()
        return sums.log2().mean(1).tolist()

    vectors = ("gammas.0.alpha", "b.alpha")
    for optimizer in ("sgd", "adamw"):
        for which, ending in enumerate(vectors):
            more = {
                size: moved("direction", vectors, optimizer, size)[which]
                - moved(None, ("norm_in.weight",), optimizer, size)[0]
                for size in (BASE, WIDE, DEEP)
            }
            # By octave of the size; a wrong rule is off by a half or one.
            assert (more[WIDE] - more[BASE]) / 2 == pytest.approx(0, abs=0.25), (optimizer, ending)
            assert more[DEEP] - more[BASE] == pytest.approx(0, abs=0.25), (optimizer, ending)


def test_weight_normalisation_keeps_its_decay_and_its_steps() -> None:
    """Of g·v/‖v‖ only g carries the depth. v decays as a weight does: that holds the size of its steps."""

    def make(width: int, depth: int) -> nn.Module:
        model = OneLayer(width, depth, form=None)
        for layer in model.layers:
            parametrizations.weight_norm(layer)
        return model

    made = th.plan(make, torch.zeros(2, 3), size=Size(16, 8), base=Size(16, 2), lr=0.25, weight_decay=0.5)
    g, v = (made[f"layers.0.parametrizations.weight.original{n}"] for n in (0, 1))
    assert (g.weight_decay, v.weight_decay) == (0.0, 0.5)
    plain = th.plan(
        partial(OneLayer, form=None), torch.zeros(2, 3), size=Size(16, 8), base=Size(16, 2), lr=0.25
    )
    # A step of v turns it by lr/‖v‖, which has to be what the plain weight's own lr/‖W‖ is.
    weight = plain["layers.0.weight"]
    assert v.lr / v.init.std == pytest.approx(weight.lr / weight.init.std)
