"""Scale vectors put inside weights by hand: `diag(b)·W·diag(γ)` as parametrizations, in four forms."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization

FORMS = ("plain", "direction", "product", "exp")


class Vector(nn.Module):
    """γ, or β and α with γ = β·α/rms(α), β·α or e^β·α; a stack of them, one for each expert."""

    def __init__(self, gain: Tensor, form: str) -> None:
        super().__init__()
        self.form = form
        self.alpha = nn.Parameter(gain.detach().clone())
        if form != "plain":
            beta = {"direction": _rms(gain.detach()), "product": torch.ones(1), "exp": torch.zeros(1)}[form]
            self.beta = nn.Parameter(beta.expand(*gain.shape[:-1], 1).clone())

    def forward(self) -> Tensor:
        """γ."""
        if self.form == "plain":
            return self.alpha
        if self.form == "exp":
            return self.beta.exp() * self.alpha
        return self.beta * self.alpha / (_rms(self.alpha) if self.form == "direction" else 1)


class Scaled(nn.Module):
    """Weights (…, out, in), or (in, out) if `turned`, times a γ for each block of rows and a b."""

    def __init__(
        self, weight: Tensor, gain: Tensor, form: str, rows: Sequence[int] = (), turned: bool = False
    ) -> None:
        super().__init__()
        self.turned = turned
        out, stack = weight.shape[-1 if turned else -2], weight.shape[:-2]
        self.rows = list(rows) or [out]
        self.gammas = nn.ModuleList(Vector(gain.expand(*stack, -1), form) for _ in self.rows)
        self.b = Vector(torch.ones(*stack, out), form)

    def forward(self, weight: Tensor) -> Tensor:
        """The weight that is used."""
        blocks = zip(self.gammas, self.rows, strict=True)
        spread = [gamma()[..., None, :].expand(*weight.shape[:-2], size, -1) for gamma, size in blocks]
        inner, outer = torch.cat(spread, -2) if len(spread) > 1 else spread[0], self.b()[..., None]
        return weight * (inner * outer).mT if self.turned else outer * weight * inner


class OwnGain(nn.Module):
    """A norm's own gain as magnitude and direction; a zero-centred norm adds its offset again."""

    def __init__(self, gain: Tensor, form: str, offset: float = 0.0) -> None:
        super().__init__()
        self.form, self.offset = form, offset
        self.beta = nn.Parameter({"product": torch.ones(1), "exp": torch.zeros(1)}.get(form, _rms(gain)))

    def forward(self, alpha: Tensor) -> Tensor:
        """What the norm takes for its gain."""
        if self.form == "exp":
            return self.beta.exp() * alpha - self.offset
        return self.beta * alpha / (_rms(alpha) if self.form == "direction" else 1) - self.offset


def scale(
    module: nn.Module,
    name: str,
    norm: nn.Module,
    form: str,
    rows: Sequence[int] = (),
    turned: bool = False,
) -> None:
    """Put copies of a norm's gain into a weight."""
    gain = norm.weight
    assert isinstance(gain, Tensor)
    made = Scaled(getattr(module, name), gain.detach(), form, rows, turned)
    register_parametrization(module, name, made, unsafe=True)


def own_gain(norm: nn.Module, form: str, offset: float = 0.0) -> None:
    """Split a norm's own gain into magnitude and direction: `weight` is the direction from then on."""
    assert isinstance(norm.weight, Tensor)
    with torch.no_grad():
        norm.weight += offset
    made = OwnGain(norm.weight.detach(), form, offset)
    register_parametrization(norm, "weight", made, unsafe=True)


def retire(*norms: nn.Module) -> None:
    """The gains of norms become ones that nobody trains."""
    for norm in norms:
        ones = torch.ones_like(norm.weight)  # type: ignore[arg-type]
        del norm.weight
        norm.register_buffer("weight", ones.detach())


def scaled_gpt(model: nn.Module, form: str) -> nn.Module:
    """A built-in GPT with vectors in all that reads a norm, and magnitudes on the norms that end a branch."""
    for block in model.blocks:  # type: ignore[union-attr]
        for residual in (block.attention, block.feed_forward):
            branch, norm = residual.branch, residual.norm_in
            if not isinstance(norm, nn.Identity):
                for name in ("query", "key", "value", "router", "gate", "up"):
                    held = getattr(branch, name, None)
                    if isinstance(held, nn.Linear):
                        scale(held, "weight", norm, form)
                    elif held is not None:
                        scale(branch, name, norm, form)
                retire(norm)
            if not isinstance(residual.norm_out, nn.Identity) and form != "plain":
                own_gain(residual.norm_out, form)
    if not isinstance(model.norm, nn.Identity) and model.readout.weight is not model.embed.weight:  # type: ignore[union-attr]
        scale(model.readout, "weight", model.norm, form)  # type: ignore[arg-type]
        retire(model.norm)  # type: ignore[arg-type]
    return model


def _rms(x: Tensor) -> Tensor:
    return x.square().mean(-1, keepdim=True).sqrt()
