"""Cross-layer routing: a branch reads a learned mixture of the outputs of all earlier branches.

With v_0 the embedding and v_i the output of branch i,

    k_i = v_i/rms(v_i)        α_{i→l} = softmax_i(q_l·k_i/D)        h_l = Σ_{i<l} α_{i→l} v_i

replaces the sum `h_l = Σ_{i<l} v_i` of a residual stream. Every branch, and the readout, has a query q_l that
starts at zero. The mixture then is the plain mean, the residual stream over l, and a branch that begins with
a norm has the same result for both: initially the network computes the same function as the plain one.

A query can also depend on a condition, such as the time of a diffusion: `q_l + U_l c`, with a matrix U_l that
starts at zero, so that this network too starts as the plain one.

Scores are divided by D, not by √D as in attention: training aligns queries with keys, and `q·k` then grows as
D. So a step of Adam changes a score by up to its learning rate, at any width. With scores `q·k/√D` the loss
of a diffusion transformer was higher with routing than without (`theodolite study routing --draw`).

References:
    Rethinking cross-layer information routing in diffusion transformers (DAR), 2026.
"""

# B batch, T tokens, D width, N values of the history

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from theodolite.core.errors import UseError
from theodolite.models.transformer import EPS, MakeNorm, Placement


class History(NamedTuple):
    """The values computed so far, v_0 first, and their keys."""

    values: tuple[Tensor, ...]
    """(B, T, D) each."""
    keys: tuple[Tensor, ...]
    """The values divided by their root mean squares, in float32 or better."""

    def then(self, value_BTD: Tensor) -> History:
        """The history with one more value."""
        wide = torch.promote_types(value_BTD.dtype, torch.float32)
        key_BTD = F.rms_norm(value_BTD.to(wide), value_BTD.shape[-1:], eps=EPS)
        return History((*self.values, value_BTD), (*self.keys, key_BTD))


class Route(nn.Module):
    """The mixture `Σ_i α_i v_i` of a history, with the weights of a query.

    Values are added one by one and never stacked. For the backward pass, autograd keeps each value and its
    key, which all routes share, and one weight for each token: for L branches memory grows as
    `L·B·T·D + L²·B·T`, and not as `L²·B·T·D`.

    >>> history = History((), ()).then(torch.tensor([[[1.0, 1.0]]])).then(torch.tensor([[[3.0, -3.0]]]))
    >>> Route(2)(history)
    tensor([[[ 2., -1.]]], grad_fn=<...>)

    Args:
        width: features of the values.
        conditioned: does the query depend on a condition (B, D)?
    """

    def __init__(self, width: int, *, conditioned: bool = False) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.zeros(width))
        self.shift = nn.Parameter(torch.zeros(width, width)) if conditioned else None

    def forward(self, history: History, condition_BD: Tensor | None = None) -> Tensor:
        """h (B, T, D), summed in the precision of the keys and rounded to that of the parameters."""
        query: Tensor = self.query
        width = query.shape[-1]
        if self.shift is not None:
            assert condition_BD is not None
            query = (query + F.linear(condition_BD, self.shift))[:, :, None]
        with _full_precision(self.query):
            scores = [(key_BTD @ query.to(key_BTD.dtype)) / width for key_BTD in history.keys]
        if self.shift is not None:
            scores = [score_BT1.squeeze(-1) for score_BT1 in scores]
        weights_NBT = torch.softmax(torch.stack(scores), dim=0)
        terms = zip(weights_NBT.unbind(0), history.values, strict=True)
        mixed_BTD, *others = (weight_BT[..., None] * value_BTD for weight_BT, value_BTD in terms)
        for term_BTD in others:
            mixed_BTD = mixed_BTD + term_BTD
        return mixed_BTD.to(self.query.dtype)


class Routed(nn.Module):
    """A branch that reads a mixture of the history: `v = f(N h)`, or `v = N_out f(N_in h)`.

    Args:
        branch: the module f; further arguments of `forward` are passed on to it.
        width: features of the values.
        placement: `pre` or `peri`. The mean of many values is small, so without a norm in front a branch
            would start the smaller, the deeper it stands.
        norm: makes a norm for a number of features.
        first: whether only the embedding is before it; then there is no query.
    """

    def __init__(
        self, branch: nn.Module, width: int, placement: Placement, norm: MakeNorm, *, first: bool = False
    ) -> None:
        super().__init__()
        require_routable(placement)
        self.route = None if first else Route(width)
        self.norm_in = norm(width)
        self.branch = branch
        self.norm_out = norm(width) if placement == "peri" else nn.Identity()

    def forward(self, history: History, *rest: Any) -> History:
        """The history with the output of the branch."""
        h_BTD = history.values[0] if self.route is None else self.route(history)
        return history.then(self.norm_out(self.branch(self.norm_in(h_BTD), *rest)))


def require_routable(placement: Placement) -> None:
    """Check that routed branches begin with a norm.

    >>> require_routable("post")
    Traceback (most recent call last):
    theodolite.UseError: norm_placement is 'post': with residual='routed' a branch reads a mean of many
    values, which is small, and has to begin with a norm. Give 'pre' or 'peri'
    """
    if placement not in ("pre", "peri"):
        raise UseError(
            f"norm_placement is {placement!r}: with residual='routed' a branch reads a mean of many values, "
            "which is small, and has to begin with a norm. Give 'pre' or 'peri'"
        )


def _full_precision(like: Tensor) -> contextlib.AbstractContextManager[Any]:
    """No autocast: it would round scores and keep a rounded copy of every key for every route."""
    kind = like.device.type
    return contextlib.nullcontext() if kind == "meta" else torch.autocast(kind, enabled=False)
