"""Which tensor goes to which optimizer: by what the network does with it, and by no name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.planning.mixed import (
    PIXELS,
    TOKENS,
    Attention,
    Convolutions,
    FeedForward,
    MixedGPT,
    Recurrent,
    Renamable,
    rename,
)
from torch import nn

import theodolite as th
from theodolite.planning import Groups, groups
from theodolite.planning.translation import shape_seen


def seen(made: Groups) -> dict[str, tuple[str, str]]:
    """By tensor: its optimizer and the shape that it sees."""
    return {name: (row.rule, shape_seen(row)) for name, row in made.rows.items()}


GPT_BY_HAND = {
    "tokens.weight": ("adamw", "23×16"),
    "places.weight": ("adamw", "8×16"),
    "blocks.0.norm.weight": ("adamw", "16"),
    "blocks.0.norm.bias": ("adamw", "16"),
    "blocks.0.qkv.weight": ("muon", "3 of 16×16"),
    "blocks.0.qkv.bias": ("adamw", "48"),
    "blocks.0.out.weight": ("muon", "16×16"),
    "blocks.0.out.bias": ("adamw", "16"),
    "blocks.1.norm.weight": ("adamw", "16"),
    "blocks.1.up.weight": ("muon", "32×16, stored 16×32"),
    "blocks.1.down.weight": ("muon", "16×32, stored 32×16"),
    "blocks.2.norm.weight": ("adamw", "16"),
    "blocks.2.router.weight": ("adamw", "4×16"),
    "blocks.2.up": ("muon", "4 of 32×16, stored 4×32×16"),
    "blocks.2.down": ("muon", "4 of 16×32, stored 4×16×32"),
    "norm.weight": ("adamw", "16"),
    "norm.bias": ("adamw", "16"),
}
CONVOLUTIONS_BY_HAND = {
    "stem.weight": ("adamw", "8×3×3×3"),
    "norm.weight": ("adamw", "8"),
    "norm.bias": ("adamw", "8"),
    "wide.weight": ("muon", "16×72, stored 16×8×3×3"),
    "back.weight": ("muon", "8×16, stored 8×16×1×1"),
    "each.weight": ("adamw", "8×1×3×3"),
    "readout.weight": ("adamw", "5×8"),
    "readout.bias": ("adamw", "5"),
}
EXAMPLES: dict[str, tuple[type[nn.Module], Any, th.Size]] = {
    "gpt": (MixedGPT, TOKENS, th.Size(16, 1)),
    "convolutions": (Convolutions, PIXELS, th.Size(8, 1)),
    "recurrent": (Recurrent, TOKENS, th.Size(16, 1)),
}


@pytest.mark.parametrize("ready", [True, False], ids=["a ready module", "a build function"])
@pytest.mark.parametrize(
    ("name", "by_hand"), [("gpt", GPT_BY_HAND), ("convolutions", CONVOLUTIONS_BY_HAND)], ids=["gpt", "cnn"]
)
def test_optimizers_and_shapes_by_hand(name: str, by_hand: dict[str, tuple[str, str]], ready: bool) -> None:
    build, inputs, size = EXAMPLES[name]
    made = groups(build(), inputs, lr=0.1) if ready else groups(build, inputs, size=size, lr=0.1)
    assert seen(made) == by_hand


@pytest.mark.parametrize("ready", [True, False], ids=["a ready module", "a build function"])
def test_the_weights_of_an_lstm_go_to_muon_and_nothing_else_does(ready: bool) -> None:
    size = None if ready else th.Size(16, 1)
    made = groups(Recurrent() if ready else Recurrent, TOKENS, size=size, lr=0.1)
    by_muon = [name for name, row in made.rows.items() if row.rule == "muon"]
    assert by_muon == ["lstm.weight_ih_l0", "lstm.weight_hh_l0"]


@pytest.mark.parametrize("name", EXAMPLES)
def test_names_are_not_read(name: str) -> None:
    build, inputs, _ = EXAMPLES[name]
    plain, other = (groups(one, inputs, lr=0.1) for one in (build(), rename(build())))
    assert list(plain.rows) != list(other.rows)

    def facts(made: Groups) -> list[Any]:
        return [
            (row.role, row.rule, shape_seen(row), row.lr, row.weight_decay, row.reasons)
            for row in made.rows.values()
        ]

    assert facts(plain) == facts(other)


def test_where_the_usual_list_of_names_goes_wrong() -> None:
    """Two dimensions, and neither `embed` nor `head` in the name, as in most training scripts."""

    def by_name(model: nn.Module) -> set[str]:
        return {
            name
            for name, tensor in model.named_parameters()
            if tensor.ndim == 2 and "embed" not in name and "head" not in name
        }

    def by_groups(model: nn.Module, inputs: Any) -> set[str]:
        return {name for name, row in groups(model, inputs, lr=0.1).rows.items() if row.rule == "muon"}

    gpt, kernels = MixedGPT(), Convolutions()
    assert by_name(gpt) - by_groups(gpt, TOKENS) == {
        "tokens.weight",  # the tied table, as it is not called an embedding
        "places.weight",
        "blocks.2.router.weight",
    }
    assert by_groups(gpt, TOKENS) - by_name(gpt) == {"blocks.2.up", "blocks.2.down"}  # the experts
    assert by_name(kernels) == {"readout.weight"}  # the one matrix that is not Muon's
    assert by_groups(kernels, PIXELS) == {"wide.weight", "back.weight"}


def test_the_reasons_say_what_each_tensor_does() -> None:
    rows = groups(MixedGPT(), TOKENS, lr=0.1).rows
    words = {
        "tokens.weight": "tied table: a lookup and the readout",
        "places.weight": "table: its rows are looked up",
        "blocks.0.qkv.weight": "both fans follow the width, fused",
        "blocks.2.up": "both fans follow the width, a stack",
        "blocks.2.router.weight": "router or gate: its outputs do not grow",
        "blocks.0.norm.weight": "Input-Norm gain",
        "norm.weight": "Output-Norm gain",
        "blocks.0.qkv.bias": "bias",
    }
    assert {name: rows[name].reasons["why"] for name in words} == words
    kernels = groups(Convolutions(), PIXELS, lr=0.1).rows
    assert kernels["each.weight"].reasons["why"] == "kernel with one input channel"
    assert kernels["readout.weight"].reasons["why"] == "readout: its outputs do not grow"


def test_covers_all_gives_tables_and_readouts_to_muon_too() -> None:
    rows = groups(Convolutions(), PIXELS, lr=0.1, covers="all").rows
    by_adamw = [name for name, row in rows.items() if row.rule == "adamw"]
    assert by_adamw == ["norm.weight", "norm.bias", "readout.bias"]


def test_a_vector_that_is_joined_to_the_signal_is_no_matrix_for_muon() -> None:
    class Joined(nn.Module):
        """A class token in front of the tokens, as in a vision transformer."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.block, self.last = nn.Linear(3, 16), Attention(16), nn.Linear(16, 5)
            self.token = nn.Parameter(torch.randn(1, 1, 16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.cat([self.token.expand(x.shape[0], -1, -1), self.first(x)], 1)
            found: torch.Tensor = self.last(self.block(x)[:, 0])
            return found

    rows = groups(Joined(), torch.randn(2, 4, 3), lr=0.1, covers="all").rows
    assert (rows["token"].role, rows["token"].rule) == ("input", "adamw")
    assert rows["first.weight"].rule == "muon"


def test_an_optimizer_of_all_tensors_has_them_all() -> None:
    made = groups(MixedGPT(), TOKENS, optimizer="lion", lr=0.1)
    assert {row.rule for row in made.trained} == {"lion"}


def test_what_decays_is_what_a_plan_lets_decay() -> None:
    size = th.Size(16, 1)
    for policy in ("paper", "independent", "none", "matrices", "everything"):
        given: Any = {"optimizer": "muon", "lr": 0.1, "weight_decay": 0.05, "decay": policy}
        made = groups(MixedGPT, TOKENS, size=size, no_decay=["blocks.0.out.*"], **given)
        plan = th.plan(MixedGPT, TOKENS, size=size, base=size, no_decay=["blocks.0.out.*"], **given)
        assert {name: row.weight_decay for name, row in made.rows.items()} == {
            name: pytest.approx(row.weight_decay) for name, row in plan.rows.items()
        }


def test_a_tensor_that_the_network_marks_does_not_decay() -> None:
    model = MixedGPT()
    model.blocks[0].out.weight._no_weight_decay = True
    rows = groups(model, TOKENS, lr=0.1, weight_decay=0.1).rows
    assert rows["blocks.0.out.weight"].weight_decay == 0
    assert rows["blocks.0.qkv.weight"].weight_decay == 0.1


def test_sphere_optimizers_do_not_decay() -> None:
    rows = groups(MixedGPT(), TOKENS, optimizer="muonh", lr=0.1, weight_decay=0.1).rows
    assert rows["blocks.0.out.weight"].weight_decay == 0
    assert rows["tokens.weight"].weight_decay == 0.1


class Spare(Renamable):
    """One tensor is frozen, another is read by nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.block, self.last = nn.Linear(3, 8), FeedForward(8), nn.Linear(8, 2)
        self.spare = nn.Linear(8, 8, bias=False)
        self.first.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(self.block(self.first(x)))
        return found


def test_frozen_and_unused_tensors_are_listed_and_not_trained() -> None:
    model = Spare()
    made = groups(model, torch.zeros(1, 3), lr=0.1)
    assert {name: row.role for name, row in made.rows.items() if not row.trained} == {
        "first.weight": "frozen",
        "spare.weight": "unused",
    }
    named = {name for group in made.param_groups() for name in group["param_names"]}
    assert named == set(dict(model.named_parameters())) - {"first.weight", "spare.weight"}
    text = str(made)
    assert "requires_grad" in text
    assert "nothing in the forward" in " ".join(text.split())
    assert any("1 tensor is frozen (first.weight)" in note for note in made.notes)


def test_roles_of_the_caller_count() -> None:
    rows = groups(MixedGPT(), TOKENS, lr=0.1, roles={"blocks.0.out.weight": "output"}).rows
    assert rows["blocks.0.out.weight"].rule == "adamw"


def test_the_rate_of_the_rest_is_named() -> None:
    (note,) = groups(Convolutions(), PIXELS, lr=0.02).notes
    # 72 and 16 inputs and outputs at most: 0.02/(0.2·√72) and 0.02/(0.2·√16).
    assert note.startswith("At lr 0.02, muon moves its weights by the RMS of AdamW at 0.0118 to 0.025.")
    (note,) = groups(Convolutions(), PIXELS, lr=0.5, vector_lr=1e-3).notes
    assert note.endswith("AdamW trains the rest at 0.001.")
    (note,) = groups(Convolutions(64), PIXELS, lr=0.5).notes
    assert note.startswith("Warning: ")


def test_a_rate_of_adamw_that_is_too_small_is_named_too() -> None:
    layers = nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)
    (note,) = groups(nn.Sequential(*layers), torch.zeros(1, 3), lr=0.02).notes
    # UVᵀ of 4×4 has an RMS of 1/√4, which is that of AdamW at 0.02·(1/2)/0.2.
    assert note.startswith("Warning: At lr 0.02, muon moves its weights by the RMS of AdamW at 0.05.")
    assert note.endswith("vector_lr=0.05 would move both alike.")


def test_the_optimizer_that_was_named_is_counted_where_it_has_no_tensor() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    assert "0 tensors by muon and 4 tensors by adamw" in str(groups(model, torch.zeros(1, 4), lr=0.1))


def test_the_rate_of_adamw_is_that_of_adamw_itself() -> None:
    made = groups(MixedGPT(), TOKENS, optimizer="adamw", adamw_lr=0.01, weight_decay=0.1)
    assert {row.lr for row in made.trained} == {0.01}
    assert made["tokens.weight"].weight_decay == 0.1


def test_the_eps_of_the_vectors_is_an_option_of_theirs_alone() -> None:
    made = groups(MixedGPT(), TOKENS, lr=0.1, eps=1e-5, vector_options={"eps": 1e-6})
    assert {(row.rule, row.eps) for row in made.trained} == {("muon", 1e-5), ("adamw", 1e-6)}
    assert {group["eps"] for group in made.split().adamw} == {1e-6}
    assert '"eps": 1e-06' in made.export("torch").text


def test_it_leaves_the_network_and_the_random_numbers_as_they_were() -> None:
    model = MixedGPT().train()
    before = {name: one.clone() for name, one in model.state_dict().items()}
    state = torch.get_rng_state()
    groups(model, TOKENS, lr=0.1)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not model._forward_hooks


class Complex(nn.Module):
    """A matrix of complex numbers between real ones."""

    def __init__(self, width: int = 8, depth: int = 1) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, width), nn.Linear(width, 2)
        self.turn = nn.Parameter(torch.randn(width, width, dtype=torch.cfloat))
        self.real = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(self.real((self.first(x).to(torch.cfloat) @ self.turn).real))
        return found


@pytest.mark.parametrize("ready", [True, False], ids=["a ready module", "a build function"])
def test_complex_matrices_go_to_adamw(ready: bool) -> None:
    model, inputs = Complex(), torch.randn(4, 3)
    made = groups(model if ready else Complex, inputs, size=None if ready else th.Size(8, 1), lr=0.1)
    assert (made["turn"].rule, made["turn"].role) == ("adamw", "hidden")
    assert made["turn"].reasons["why"] == "complex: muon trains real matrices"
    assert made["real.weight"].rule == "muon"
    optimizer = made.optimizer(model)
    before = model.turn.detach().clone()
    model(inputs).sum().backward()
    optimizer.step()
    assert not torch.equal(model.turn, before)
    assert groups(model, inputs, lr=0.1, optimizer="adamw")["turn"].reasons["why"].startswith("both fans")


def test_the_reason_of_a_pair_of_low_rank_is_its_rank() -> None:
    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.whole, self.last = nn.Linear(3, 32), nn.Linear(32, 32), nn.Linear(32, 2)
            self.a, self.b = nn.Linear(32, 4, bias=False), nn.Linear(4, 32, bias=False)
            self.whole.requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            found: torch.Tensor = self.last(torch.relu(self.whole(x) + self.b(self.a(x))))
            return found

    rows = groups(Adapted(), torch.zeros(1, 3), lr=0.1).rows
    assert rows["a.weight"].reasons["why"] == "its outputs, of low rank, do not grow"
    assert rows["b.weight"].reasons["why"] == "its inputs, of low rank, do not grow"


@pytest.mark.parametrize("rate", ["lr", "adamw_lr"])
def test_an_independent_decay_is_the_same_fraction_in_every_step(rate: str) -> None:
    given: dict[str, Any] = {rate: 0.01, "weight_decay": 1e-4, "decay": "independent"}
    rows = groups(MixedGPT(), TOKENS, **given).trained
    decaying = [row for row in rows if row.weight_decay]
    assert {row.rule for row in decaying} == {"muon", "adamw"}
    assert [row.lr * row.weight_decay for row in decaying] == pytest.approx([1e-4] * len(decaying))


def test_of_several_shapes_the_rate_that_is_advised_is_the_highest() -> None:
    """At lr 0.1 Muon moves 8×16 as AdamW at 0.1/(0.2·√16), and 16×72 as AdamW at 0.1/(0.2·√72)."""
    (note,) = [one for one in groups(Convolutions(), PIXELS, lr=0.1).notes if "vector_lr is not" in one]
    assert "by the RMS of AdamW at 0.0589 to 0.125." in note
    assert "vector_lr=0.125 would" in note


def test_a_table_without_decay_has_no_column_of_it() -> None:
    assert "decay" not in str(groups(MixedGPT(), TOKENS, lr=0.1).table())
    assert "decay" in str(groups(MixedGPT(), TOKENS, lr=0.1, weight_decay=0.1).table())
