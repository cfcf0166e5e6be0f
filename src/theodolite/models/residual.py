"""Where the norms of a residual branch stand."""

# B batch, T tokens, D width

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, get_args

from torch import Tensor, nn

from theodolite.models.options import require_one_of

NormKind = Literal["rms", "layer"]
Placement = Literal["pre", "post", "peri", "out", "none"]
MakeNorm = Callable[[int], nn.Module]

EPS = 1e-5


def make_norm(kind: NormKind, *, shift: bool) -> MakeNorm:
    """The function `features -> norm`: `x/rms(x)·γ`, or `(x − mean)/std·γ` with a shift β if asked for.

    >>> import torch
    >>> make_norm("rms", shift=False)(2)(torch.tensor([1.0, 7.0]))
    tensor([0.2000, 1.4000], grad_fn=<...>)
    """
    require_one_of("norm", kind, get_args(NormKind))
    if kind == "rms":
        return partial(nn.RMSNorm, eps=EPS)
    return partial(nn.LayerNorm, eps=EPS, bias=shift)


class Residual(nn.Module):
    """A branch f added to the stream x, with norms where the placement says.

    | placement | computes | final norm |
    |---|---|---|
    | `pre` | `x + f(N x)` | yes |
    | `post` | `N(x + f(x))` | no |
    | `peri` | `x + N_out f(N_in x)` | yes |
    | `out` | `x + N_out f(x)` | yes |
    | `none` | `x + f(x)` | no |

    Args:
        branch: the module f; what `forward` gets besides the stream is handed on to it.
        width: features of the stream.
        placement: a row of the table.
        norm: makes a norm of so many features.

    >>> import torch
    >>> Residual(nn.Identity(), 2, "none", make_norm("rms", shift=False))(torch.tensor([[[3.0, 4.0]]]))
    tensor([[[6., 8.]]])
    """

    def __init__(self, branch: nn.Module, width: int, placement: Placement, norm: MakeNorm) -> None:
        super().__init__()
        self.norm_in = norm(width) if placement in ("pre", "peri") else nn.Identity()
        self.branch = branch
        self.norm_out = norm(width) if placement in ("peri", "out") else nn.Identity()
        self.norm_stream = norm(width) if placement == "post" else nn.Identity()

    def forward(self, x_BTD: Tensor, *rest: Any) -> Tensor:
        """The stream after the branch was added."""
        branch_BTD = self.branch(self.norm_in(x_BTD), *rest)
        return self.norm_stream(x_BTD + self.norm_out(branch_BTD))
