"""The feed-forward branch of a transformer: one for all tokens, or a mixture of experts."""

# B batch, T tokens, N = B·T, D width, F hidden features, E experts

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from theodolite.core.errors import UseError


def hidden_features(width: int, *, gated: bool) -> int:
    """Hidden features: 4·width, or 3·width if gated.

    3 is the whole number nearest to the usual 8/3, which keeps the parameters of three matrices near
    those of two; whole, so that every fan is exactly proportional to width.

    >>> hidden_features(64, gated=False), hidden_features(64, gated=True)
    (256, 192)
    """
    return (3 if gated else 4) * width


class FeedForward(nn.Module):
    """`W_down gelu(W_up x)`, or gated (SwiGLU) `W_down (silu(W_gate x) ∘ W_up x)`.

    >>> FeedForward(2, gated=True)(torch.zeros(2))
    tensor([0., 0.], grad_fn=<...>)

    References:
        Shazeer, GLU variants improve transformer, 2020.
    """

    def __init__(self, width: int, *, gated: bool = False, bias: bool = False) -> None:
        super().__init__()
        hidden = hidden_features(width, gated=gated)
        self.gate = nn.Linear(width, hidden, bias=bias) if gated else None
        self.up = nn.Linear(width, hidden, bias=bias)
        self.down = nn.Linear(hidden, width, bias=bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """What the branch adds to the stream."""
        up_BTF = self.up(x_BTD)
        hidden_BTF = F.gelu(up_BTF) if self.gate is None else F.silu(self.gate(x_BTD)) * up_BTF
        return self.down(hidden_BTF)


class Experts(nn.Module):
    """A mixture of feed-forwards, `Σ_e p_e f_e(x)`, in which each token has `active` experts.

    The router's softmax goes over the largest `active` of its logits and is zero elsewhere. Every
    expert is computed for every token: E/active times the work of a grouped kernel, and in return
    static shapes, which vmap, fake tensors and CUDA graphs need. There is no load-balancing loss.

    The weights are stacks of matrices (E, out, in) without biases.

    Args:
        width: features of the stream.
        experts: number E of feed-forwards.
        active: how many of them each token has. One alone would have weight 1 whatever the router
            says, and the router would never learn.
        gated: SwiGLU or GELU inside an expert.

    A router of zeros gives every expert the same weight, here 1/2:

    >>> mixture = Experts(2, experts=2, active=2)
    >>> _ = nn.init.zeros_(mixture.router.weight), nn.init.ones_(mixture.up), nn.init.ones_(mixture.down)
    >>> torch.allclose(mixture(torch.ones(1, 1, 2)), 8 * F.gelu(torch.tensor(2.0)))
    True

    References:
        Shazeer et al., Outrageously large neural networks, 2017. Jiang et al., Mixtral of experts, 2024.
    """

    def __init__(self, width: int, *, experts: int, active: int = 2, gated: bool = False) -> None:
        super().__init__()
        if experts < 2:
            raise UseError(
                f"experts is {experts}: give 2 or more, or 0 for one feed-forward without a router"
            )
        if not 2 <= active <= experts:
            raise UseError(
                f"active is {active}: give 2 to {experts} (experts), because a router of one active expert "
                "gets no gradient"
            )
        hidden = hidden_features(width, gated=gated)
        self.active = active
        self.router = nn.Linear(width, experts, bias=False)
        self.gate = _stack(experts, hidden, width) if gated else None
        self.up = _stack(experts, hidden, width)
        self.down = _stack(experts, width, hidden)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """What the branch adds to the stream."""
        x_ND = x_BTD.flatten(0, -2)
        x_END = x_ND.expand(len(self.up), *x_ND.shape)
        up_ENF = torch.bmm(x_END, self.up.mT)
        hidden_ENF = F.gelu(up_ENF) if self.gate is None else F.silu(torch.bmm(x_END, self.gate.mT)) * up_ENF
        out_END = torch.bmm(hidden_ENF, self.down.mT)
        share_EN = self.shares(x_ND).mT
        return (share_EN[..., None] * out_END).sum(0).view_as(x_BTD)

    def shares(self, x_ND: Tensor) -> Tensor:
        """The weight p_e of each expert for each token: a row sums to 1 and has `active` nonzeros.

        >>> mixture = Experts(8, experts=4, active=2)
        >>> (mixture.shares(torch.randn(5, 8)) > 0).sum(1)
        tensor([2, 2, 2, 2, 2])
        """
        logits_NE = self.router(x_ND)
        chosen = logits_NE.topk(self.active, dim=-1)
        masked_NE = torch.full_like(logits_NE, -torch.inf).scatter(-1, chosen.indices, chosen.values)
        return masked_NE.softmax(-1)


def _stack(experts: int, fan_out: int, fan_in: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(experts, fan_out, fan_in) * fan_in**-0.5)
