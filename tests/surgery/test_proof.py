"""A fault in an edit is seen by its proof, and the network is what it was before, to the last bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from theodolite.surgery import SurgeryError, convert, converting, fold, fold_map, scale_vectors
from theodolite.surgery.fold_map import FoldMap
from theodolite.surgery.gains import GainFinder, NormGain, NormGains
from theodolite.surgery.proof import TOLERANCE, Proof, reasons, respond
from theodolite.surgery.vectors import ScaledWeight

from .networks import TOKENS, logits, network, train
from .test_folding import skeleton

Plant = Callable[[pytest.MonkeyPatch], None]


def channels_moved_by_one(patch: pytest.MonkeyPatch) -> None:
    along = fold_map.along
    for module in (fold_map, converting):
        patch.setattr(module, "along", lambda r, gain, nothing: along(r, gain.roll(1), nothing=nothing))


def blocks_of_rows_turned_about(patch: pytest.MonkeyPatch) -> None:
    _vectors(patch, lambda name: name.replace("puts.0.", "puts.x.").replace("s.1.", "s.0.").replace("x", "1"))


def outputs_taken_for_the_others(patch: pytest.MonkeyPatch) -> None:
    _vectors(patch, lambda name: name.replace("outputs.0", "outputs.1"))


def _vectors(patch: pytest.MonkeyPatch, other: Callable[[str], str]) -> None:
    """Fold with the vectors of other names."""
    called = fold_map._called

    def wrong(how: nn.Module, weight: str, given: dict[str, Tensor], tensor: Tensor) -> Tensor:
        names = [f"{fold_map.prefix_of(weight)}0.{name}" for name, _ in how.named_parameters()]
        return called(how, weight, {name: given[other(name)] for name in names}, tensor)

    patch.setattr(fold_map, "_called", wrong)


def _with(patch: pytest.MonkeyPatch, **changes: Any) -> None:
    found = GainFinder.gains

    def gains(self: GainFinder) -> NormGains:
        made = found(self)
        every = tuple(dataclasses.replace(gain, **changes) for gain in made.found)
        return dataclasses.replace(made, found=every)

    patch.setattr(GainFinder, "gains", gains)


def offset_forgotten(patch: pytest.MonkeyPatch) -> None:
    _with(patch, offset=0.0)


def shift_forgotten(patch: pytest.MonkeyPatch) -> None:
    values = FoldMap.values

    def without(self: FoldMap) -> dict[str, Tensor]:
        bare = dataclasses.replace(self.gain, shift=None)
        kept = {reader.bias: self.tensors[reader.bias] for reader in self.gain.readers if reader.bias}
        return {**values(dataclasses.replace(self, gain=bare)), **kept}

    patch.setattr(FoldMap, "values", without)


def one_map_forgotten(patch: pytest.MonkeyPatch) -> None:
    gain = GainFinder._gain

    def without(self: GainFinder, name: str, uses: Any) -> NormGain | str:
        found = gain(self, name, uses)
        return found if isinstance(found, str) else dataclasses.replace(found, readers=found.readers[1:])

    patch.setattr(GainFinder, "_gain", without)


def _changed(model: nn.Module, before: dict[str, Tensor]) -> list[str]:
    after = model.state_dict()
    return [name for name, one in before.items() if not torch.equal(after[name], one)]


@pytest.mark.parametrize(
    ("plant", "name"),
    [
        (channels_moved_by_one, "gpt"),
        (channels_moved_by_one, "GPT2"),
        (offset_forgotten, "Gemma2"),
        (shift_forgotten, "gpt layer"),
        (one_map_forgotten, "gpt"),
    ],
)
def test_a_conversion_with_a_fault_is_undone(
    plant: Plant, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = network(name, torch.float32)
    before = {key: one.clone() for key, one in model.state_dict().items()}
    shape, said = skeleton(model), logits(model).detach()
    with monkeypatch.context() as patch:
        plant(patch)
        with pytest.raises(SurgeryError, match="scale_vectors would change the network: outputs by"):
            scale_vectors(model, TOKENS)
    assert skeleton(model) == shape
    assert not _changed(model, before)
    assert torch.equal(logits(model), said)
    scale_vectors(model, TOKENS)  # without the fault it goes through


@pytest.mark.parametrize(
    ("plant", "name", "options"),
    [
        (channels_moved_by_one, "gpt", None),
        (channels_moved_by_one, "gpt", {"heterogeneous": False}),
        (shift_forgotten, "gpt layer", None),
        (shift_forgotten, "gpt layer", {"heterogeneous": False}),
        (offset_forgotten, "Gemma2", None),
        (offset_forgotten, "Gemma2", {}),
        (blocks_of_rows_turned_about, "GPT2", {}),
        (outputs_taken_for_the_others, "GPT2", {"placement": "output", "reparameterization": None}),
    ],
)
def test_a_folding_with_a_fault_is_undone(
    plant: Plant, name: str, options: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = network(name, torch.float32)
    if options is not None:
        gains = None if name != "GPT2" else ["*ln_1*"]  # of maps with several blocks of rows
        model = train(convert(model, TOKENS, gains=gains, **options))
    before = {key: one.clone() for key, one in model.state_dict().items()}
    shape, said = skeleton(model), logits(model).detach()
    with monkeypatch.context() as patch:
        plant(patch)
        with pytest.raises(SurgeryError, match="fold would change the network: outputs by"):
            fold(model, TOKENS)
    assert not _changed(model, before)
    assert torch.equal(logits(model), said)
    assert skeleton(model)["state"] == shape["state"]
    fold(model, TOKENS)


def test_a_proof_says_what_was_done_and_left() -> None:
    _, proof = scale_vectors(network("gpt tied"), TOKENS)
    lines = str(proof).splitlines()
    assert lines[0] == "scale_vectors: 2 gains moved, 1 left"
    assert lines[1].endswith("(at most 1e-10), float64, on int64 (2, 6)")
    assert lines[2] == "  left norm.weight: embed.weight, which reads it, is an embedding too"


def test_one_gain_is_a_gain() -> None:
    proof = Proof("fold", None, None, "float32", "", 1e-4, ("norm.weight",))
    assert str(proof).startswith("fold: 1 gain moved, 0 left")
    assert reasons({"norm.weight": "it is tied"}).startswith("its only gain could not be moved")


def test_the_coarsest_dtype_that_a_network_computes_in_sets_the_tolerance() -> None:
    """A float64 network whose norms round to float32 cannot be proved to ten digits."""
    _, proof = scale_vectors(network("Gemma2"), TOKENS)
    assert (proof.dtype, proof.rtol) == ("float32", TOLERANCE[torch.float32])


def test_gradients_by_what_the_network_computes_with_are_those_of_explicit_weights() -> None:
    """G of W_eff, from the same weights put into a plain network."""
    model = train(convert(network("gpt"), TOKENS))
    plain = network("gpt")
    names = [one.weight for one in model.modules() if isinstance(one, ScaledWeight)]
    with torch.no_grad():
        for name, one in plain.named_parameters():
            if name in names:
                module, _, attribute = name.rpartition(".")
                one.copy_(getattr(model.get_submodule(module), attribute))
            else:
                one.copy_(model.state_dict()[name])
    explicit, found = respond(plain, TOKENS), respond(model, TOKENS)
    assert explicit is not None
    assert found is not None
    for name in names:
        assert torch.allclose(found.effective[name], explicit.gradients[name], rtol=1e-9, atol=1e-12)
