"""The branches of a transformer: attention, feed-forward, mixture of experts, and their norms."""

# B batch, T tokens, N = B·T, D width, H query heads, K key/value heads, C head dimension, R = C/2 pairs,
# F hidden features, E experts

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from theodolite.core.arguments import multiple, one_of, whole
from theodolite.core.errors import UseError

NormKind = Literal["rms", "layer"]
Placement = Literal["pre", "post", "peri", "out", "none"]
MakeNorm = Callable[[int], nn.Module]

EPS = 1e-5


def make_norm(kind: NormKind, *, shift: bool) -> MakeNorm:
    """The function `features -> norm`: `x/rms(x)·γ`, or `(x − mean)/std·γ`, with a shift β if `shift`.

    >>> import torch
    >>> make_norm("rms", shift=False)(2)(torch.tensor([1.0, 7.0]))
    tensor([0.2000, 1.4000], grad_fn=<...>)
    """
    one_of("norm", kind, get_args(NormKind))
    if kind == "rms":
        return partial(nn.RMSNorm, eps=EPS)
    return partial(nn.LayerNorm, eps=EPS, bias=shift)


class Residual(nn.Module):
    """A branch f added to the stream x, with norms as the placement says.

    | placement | computes | final norm |
    |---|---|---|
    | `pre` | `x + f(N x)` | yes |
    | `post` | `N(x + f(x))` | no |
    | `peri` | `x + N_out f(N_in x)` | yes |
    | `out` | `x + N_out f(x)` | yes |
    | `none` | `x + f(x)` | no |

    Args:
        branch: the module f; further arguments of `forward` are passed on to it.
        width: features of the stream.
        placement: a row of the table.
        norm: makes a norm for a number of features.

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


Rotation = tuple[Tensor, Tensor]


class Attention(nn.Module):
    """Self-attention, `W_o softmax(q kᵀ/√C + mask) v`; the mask hides later tokens if `causal`.

    The head dimension is fixed, so the number of heads grows with width and the logits keep their scale.

    Args:
        width: features of the stream.
        head_dim: dimension C of each head.
        kv_heads: number of key/value heads, each shared by an equal group of query heads
            (grouped-query attention); None means one for each query head.
        bias: do the four projections have biases?
        qk_norm: makes the norms of queries and keys over the head dimension; None for no norms.
        causal: does a token see only itself and those before it?

    The first token can only see itself, so there the branch is `W_o W_v x`:

    >>> attention = Attention(8, head_dim=4)
    >>> x_BTD = torch.randn(1, 3, 8)
    >>> alone_BD = attention.out(attention.value(x_BTD[:, 0]))
    >>> torch.allclose(attention(x_BTD)[:, 0], alone_BD, atol=1e-6)
    True

    References:
        Vaswani et al., Attention is all you need, 2017. Ainslie et al., GQA, 2023.
    """

    def __init__(
        self,
        width: int,
        *,
        head_dim: int,
        kv_heads: int | None = None,
        bias: bool = False,
        qk_norm: MakeNorm | None = None,
        causal: bool = True,
    ) -> None:
        super().__init__()
        whole("head_dim", head_dim, least=1)
        multiple("width", width, head_dim, "heads have head_dim dimensions")
        heads = width // head_dim
        kv_heads = heads if kv_heads is None else whole("kv_heads", kv_heads, least=1)
        if heads % kv_heads:
            raise UseError(
                f"kv_heads is {kv_heads}, but width {width} has {heads} heads of {head_dim}: "
                f"give a divisor of {heads}, or None for one key/value head per head"
            )
        self.head_dim = head_dim
        self.causal = causal
        self.group = heads // kv_heads
        self.query = nn.Linear(width, width, bias=bias)
        self.key = nn.Linear(width, kv_heads * head_dim, bias=bias)
        self.value = nn.Linear(width, kv_heads * head_dim, bias=bias)
        self.query_norm = qk_norm(head_dim) if qk_norm else nn.Identity()
        self.key_norm = qk_norm(head_dim) if qk_norm else nn.Identity()
        self.out = nn.Linear(width, width, bias=bias)

    def forward(self, x_BTD: Tensor, rotation: Rotation | None = None) -> Tensor:
        """What the branch adds to the stream; `rotation` rotates queries and keys by their positions."""
        q_BHTC = self.query_norm(self._split(self.query(x_BTD)))
        k_BKTC = self.key_norm(self._split(self.key(x_BTD)))
        v_BKTC = self._split(self.value(x_BTD))
        if rotation is not None:
            q_BHTC, k_BKTC = rotate(q_BHTC, rotation), rotate(k_BKTC, rotation)
        if self.group > 1:
            k_BKTC = k_BKTC.repeat_interleave(self.group, dim=1)
            v_BKTC = v_BKTC.repeat_interleave(self.group, dim=1)
        mixed_BHTC = F.scaled_dot_product_attention(q_BHTC, k_BKTC, v_BKTC, is_causal=self.causal)
        return self.out(mixed_BHTC.transpose(1, 2).flatten(2))

    def _split(self, x_BTD: Tensor) -> Tensor:
        return x_BTD.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


def make_rotation(length: int, head_dim: int, like: Tensor, *, base: float = 10_000.0) -> Rotation:
    """Cosines and sines of `t·base^(−r/R)` for positions t and pairs r, on the device of `like`.

    Computed in every forward pass rather than kept in a buffer, which would be uninitialised in a model
    that is built on the meta device and materialised later.

    >>> cos_TR, sin_TR = make_rotation(2, 2, torch.zeros(1))
    >>> (cos_TR[1] ** 2 + sin_TR[1] ** 2).round(decimals=5), sin_TR[0]
    (tensor([1.]), tensor([0.]))
    """
    dtype = torch.promote_types(like.dtype, torch.float32)
    pairs = head_dim // 2
    frequency_R = base ** (-torch.arange(pairs, device=like.device, dtype=dtype) / pairs)
    angle_TR = torch.arange(length, device=like.device, dtype=dtype)[:, None] * frequency_R
    return angle_TR.cos(), angle_TR.sin()


def rotate(x_BHTC: Tensor, rotation: Rotation) -> Tensor:
    """Rotate pair r at position t by its angle, so that `q·k` depends only on the distance of positions.

    >>> quarter = (torch.tensor([[0.0]]), torch.tensor([[1.0]]))
    >>> rotate(torch.tensor([[[[1.0, 0.0]]]]), quarter)
    tensor([[[[0., 1.]]]])

    References:
        Su et al., RoFormer, 2021.
    """
    cos_TR, sin_TR = rotation
    a_BHTR, b_BHTR = x_BHTC.chunk(2, dim=-1)
    turned_BHTC = torch.cat((a_BHTR * cos_TR - b_BHTR * sin_TR, b_BHTR * cos_TR + a_BHTR * sin_TR), dim=-1)
    return turned_BHTC.to(x_BHTC.dtype)


def _hidden_features(width: int, *, gated: bool) -> int:
    """4·width, or 3·width if gated.

    3 is the integer nearest to the usual 8/3, with which three matrices have as many parameters as two; an
    integer makes every fan exactly proportional to width.
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
        hidden = _hidden_features(width, gated=gated)
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
    expert is computed for every token. This is E/active times the work of a grouped kernel, but shapes are
    static, as vmap, fake tensors and CUDA graphs need. There is no load-balancing loss.

    The weights are stacks of matrices (E, out, in) without biases.

    Args:
        width: features of the stream.
        experts: number E of feed-forwards.
        active: how many of them each token has, at least 2: the weight of a single one would always be 1,
            and the router would get no gradient.
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
                f"experts is {experts}: give at least 2, or 0 for one feed-forward without a router"
            )
        if not 2 <= active <= experts:
            raise UseError(
                f"active is {active}: give 2 to {experts} (experts), because a router of one active expert "
                "gets no gradient"
            )
        hidden = _hidden_features(width, gated=gated)
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
