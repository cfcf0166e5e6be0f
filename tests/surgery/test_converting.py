"""A converted network computes what it did, and its gradients are those of the plain one by the chain rule.

The chain rule is written here by hand. A map W that reads a norm's gain γ has the gradient dW = G·diag(γ), G
that by the product; with a shift β, dW = G·diag(γ) + dc·βᵀ, c the map's bias. So W keeps its gradient when γ
moves into it, and the gradient by the norm's gain is the sum of those by all the γ that it became.
"""

from __future__ import annotations

import copy
from itertools import product
from operator import attrgetter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from theodolite.surgery import convert, scale_vectors
from theodolite.surgery.vectors import ScaledGain, ScaledWeight

from .networks import NETWORKS, TOKENS, apart, exactly, gradients, logits, network

PLACEMENTS = ("input", "output", "both")
FORMS = (None, "direction", "product", "exp")
OPTIONS = [
    {"heterogeneous": own, "placement": where, "reparameterization": form}
    for own, where, form in product((True, False), PLACEMENTS, FORMS)
    if own or where != "input" or form
]
CASES = [("gpt layer", one) for one in OPTIONS] + [
    (name, OPTIONS[5 * place % len(OPTIONS)]) for place, name in enumerate(NETWORKS)
]


def _said(case: Any) -> str | None:
    if isinstance(case, dict):
        own = "own" if case["heterogeneous"] else "shared"
        return f"{own}-{case['placement']}-{case['reparameterization'] or 'plain'}"
    return None


@pytest.mark.parametrize(("name", "options"), CASES, ids=_said)
def test_outputs_and_gradients_are_those_of_the_plain_network(name: str, options: dict[str, Any]) -> None:
    plain = network(name)
    with exactly(name):
        before, slopes = gradients(plain)
        model, proof = scale_vectors(copy.deepcopy(plain), TOKENS, **options)
        after, found = gradients(model)
    assert apart(after, before) < 1e-12
    assert 0 <= proof.outputs < 1e-12  # type: ignore[operator]
    assert 0 <= proof.gradients < 1e-12  # type: ignore[operator]
    assert proof.dtype == "float64"
    assert proof.moved
    expected = Explained(plain, model, found, in_weights=options["placement"] == "output")
    largest = max(float(one.norm()) for one in slopes.values())
    for each, one in slopes.items():
        off = float((expected.slope(each) - one).norm())
        assert off < 1e-12 * max(float(one.norm()), 1e-3 * largest), each


class Explained:
    """The gradients of the plain network, by hand from those of the converted one."""

    def __init__(
        self, plain: nn.Module, model: nn.Module, found: dict[str, Tensor], in_weights: bool
    ) -> None:
        self.plain = {name: one.detach() for name, one in plain.named_parameters()}
        self.found, self.in_weights = found, in_weights
        self.names = {id(one): name for name, one in model.named_parameters()}
        self.readers = [one for one in model.modules() if isinstance(one, ScaledWeight)]
        self.gains = [(name, one) for name, one in model.named_modules() if isinstance(one, ScaledGain)]

    @torch.no_grad()
    def slope(self, name: str) -> Tensor:
        """The gradient by a tensor that the plain network must have had."""
        if name in self.found:
            return self.found[name]
        for reader in self.readers:
            if reader.weight == name:
                return self._of_weight(reader)
        for path, own in self.gains:
            if path == f"{_parts(name)}.0":
                gain = self.plain[name] + own.offset
                return self._of_pieces(self.found[f"{_parts(name)}.original"], gain, own)
        by_shift = [self._of_shift(reader) for reader in self.readers if reader.shift == name]
        by_gain = [self._of_gain(reader) for reader in self.readers if reader.gain == name]
        return torch.stack(by_shift or by_gain).sum(0)

    def _of_weight(self, reader: ScaledWeight) -> Tensor:
        held, slope = self.plain[reader.weight], self.found[f"{_parts(reader.weight)}.original"]
        gain = self._gain(reader) if self.in_weights else 1.0
        if reader.outputs:  # Σ_i b_i·∂L/∂b_i = Σ_ij W_ij·∂L/∂W_ij, and b is one
            total = torch.stack([self._of_vector(one).sum() for one in reader.outputs]).sum()
            assert torch.isclose(total, (held * gain * slope).sum(), atol=1e-9)
        slope = slope * gain
        if reader.shift is None:
            return slope
        return slope + self._by_bias(reader) * _spread(reader, self.plain[reader.shift])

    def _of_gain(self, reader: ScaledWeight) -> Tensor:
        if self.in_weights:  # W' = W·diag(γ), so ∂L/∂γ_j = Σ_i W_ij·∂L/∂W'_ij
            whole = self.plain[reader.weight] * self.found[f"{_parts(reader.weight)}.original"]
            return whole.sum([axis for axis in range(whole.dim()) if axis != _in_axis(reader)])
        every = [self._of_vector(one) for one in reader.inputs]
        return torch.stack([one.reshape(-1, one.shape[-1]).sum(0) for one in every]).sum(0)

    def _of_shift(self, reader: ScaledWeight) -> Tensor:
        """Wᵀ ∂L/∂c."""
        out_axis = 1 if _in_axis(reader) == 0 else 0
        return (self.plain[reader.weight] * self._by_bias(reader)).sum(out_axis)

    def _of_vector(self, vector: Any) -> Tensor:
        if vector.form == "plain":
            return self.found[self.names[id(vector.gain)]]
        by_alpha = self.found[self.names[id(vector.direction)]]
        return self._of_pieces(by_alpha, vector.direction, vector)

    def _of_pieces(self, by_alpha: Tensor, alpha: Tensor, pieces: Any) -> Tensor:
        """∂L/∂γ from those by direction and magnitude, where the direction is γ itself."""
        by_beta = self.found[self.names[id(pieces.magnitude)]]
        along = (alpha * by_alpha).sum(-1, keepdim=True)
        if pieces.form == "direction":  # β·α/rms(α) is the same for every length of α
            assert torch.allclose(along, torch.zeros_like(along), atol=1e-9)
            return by_alpha + alpha * by_beta / (alpha.shape[-1] * pieces.magnitude)
        assert torch.allclose(by_beta, along)
        return by_alpha

    def _by_bias(self, reader: ScaledWeight) -> Tensor:
        slope = self.found[reader.weight.removesuffix("weight") + "bias"]
        return slope[None] if _in_axis(reader) == 0 else slope[:, None]

    def _gain(self, reader: ScaledWeight) -> Tensor:
        zero_centred = "layers.0" in reader.gain and self.plain[reader.gain].mean() < 0.5
        return _spread(reader, self.plain[reader.gain] + float(zero_centred))


def _parts(name: str) -> str:
    module, _, attribute = name.rpartition(".")
    return f"{module}.parametrizations.{attribute}"


def _in_axis(reader: ScaledWeight) -> int:
    """Of GPT-2's maps the first, of all others the last."""
    return 0 if "c_attn" in reader.weight or "c_fc" in reader.weight else len(reader.shape.sizes) - 1


def _spread(reader: ScaledWeight, vector: Tensor) -> Tensor:
    return vector[:, None] if _in_axis(reader) == 0 else vector


# Fused maps: each block of rows has vectors of its own.


def _turn(model: nn.Module, name: str) -> ScaledWeight:
    """The vectors of a weight, after they were changed."""
    found = next(one for one in model.modules() if isinstance(one, ScaledWeight) and one.weight == name)
    with torch.no_grad():
        for one in found.parameters():
            one.copy_(torch.rand_like(one) + 0.5)
    return found


def _vectors(found: ScaledWeight) -> tuple[list[Tensor], list[Tensor]]:
    return [one.gain.detach() for one in found.inputs], [one.gain.detach() for one in found.outputs]


def test_queries_keys_and_values_of_gpt2_have_their_own_vectors() -> None:
    name = "transformer.h.0.attn.c_attn.weight"
    model = convert(network("GPT2"), TOKENS, reparameterization=None)
    before = model.get_parameter(f"{_parts(name)}.original").detach()
    gammas, bs = _vectors(_turn(model, name))
    wanted = [w * g[:, None] * b for w, g, b in zip(before.chunk(3, 1), gammas, bs, strict=True)]
    assert torch.allclose(dict(_used(model))[name], torch.cat(wanted, 1), rtol=1e-14)


def test_interleaved_rows_of_gpt_neox_have_their_own_vectors() -> None:
    name = "gpt_neox.layers.0.attention.query_key_value.weight"
    model = convert(network("GPTNeoX"), TOKENS, reparameterization=None)
    before = model.get_parameter(f"{_parts(name)}.original").detach().view(4, 3, 8, 32)
    gammas, bs = _vectors(_turn(model, name))
    wanted = [before[:, n] * gammas[n] * bs[n].view(4, 8, 1) for n in range(3)]
    assert torch.allclose(dict(_used(model))[name], torch.stack(wanted, 1).view(96, 32), rtol=1e-14)


def test_each_expert_of_mixtral_has_its_own_vectors_for_gate_and_up() -> None:
    name = "model.layers.0.mlp.experts.gate_up_proj"
    model = convert(network("Mixtral"), TOKENS, reparameterization=None)
    before = model.get_parameter(f"{_parts(name)}.original").detach()
    gammas, bs = _vectors(_turn(model, name))
    assert [tuple(one.shape) for one in gammas] == [(3, 32)] * 2
    pairs = zip(before.chunk(2, 1), gammas, bs, strict=True)
    wanted = [w * g[:, None, :] * b[:, :, None] for w, g, b in pairs]
    assert torch.allclose(dict(_used(model))[name], torch.cat(wanted, 1), rtol=1e-14)


def _used(model: nn.Module) -> list[tuple[str, Tensor]]:
    """The weights with vectors in them, as the network uses them."""
    found = [one.weight for one in model.modules() if isinstance(one, ScaledWeight)]
    return [(name, attrgetter(name)(model).detach()) for name in found]


@pytest.mark.parametrize("form", FORMS)
def test_a_vector_is_what_its_form_says(form: str | None) -> None:
    model = convert(network("gpt"), TOKENS, reparameterization=form)
    found = _turn(model, "readout.weight")
    weight = model.get_parameter("readout.parametrizations.weight.original").detach()
    sizes = []
    for (vector,) in (found.outputs, found.inputs):
        parts = {name: one.detach() for name, one in vector.named_parameters()}
        if form is None:
            sizes.append(parts["gain"])
        elif form == "direction":
            rms = parts["direction"].square().mean().sqrt()
            sizes.append(parts["magnitude"] * parts["direction"] / rms)
        else:
            beta = parts["magnitude"]
            sizes.append(parts["direction"] * (beta.exp() if form == "exp" else beta))
    wanted = sizes[0].diag() @ weight @ sizes[1].diag()
    assert torch.allclose(dict(_used(model))["readout.weight"], wanted, rtol=1e-13)


def test_a_norm_is_computed_once_for_all_its_maps() -> None:
    model = convert(network("gpt gated"), TOKENS)
    calls = []
    model.blocks[0].attention.norm_in.register_forward_hook(lambda *_: calls.append(1))  # type: ignore[union-attr, index]
    logits(model)
    assert calls == [1]
