"""`GPT`, a decoder-only transformer with the choices that matter for scaling as options."""

# B batch, T tokens, D width, V vocabulary

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from theodolite.core.arguments import multiple, one_of, whole
from theodolite.core.errors import UseError
from theodolite.core.size import Size
from theodolite.models.routing import History, Route, Routed, require_routable
from theodolite.models.transformer import (
    Attention,
    Experts,
    FeedForward,
    NormKind,
    Placement,
    Residual,
    Rotation,
    make_norm,
    make_rotation,
)

Positions = Literal["rotary", "learned"]
Stream = Literal["add", "routed"]


class GPT(nn.Module):
    """A causal language model: tokens (B, T) to logits (B, T, V).

    Each of `depth` blocks has two branches, attention and feed-forward, so the stream has `2·depth`
    additions. There are `width/head_dim` heads of a fixed dimension.

    Args:
        width: features D of the stream.
        depth: number of blocks.
        vocab: number V of tokens; 256 for bytes.
        context: the longest sequence.
        head_dim: dimension of each head; `width` must be a multiple of it.
        kv_heads: number of key/value heads, the same at every width; None means as many as heads.
        positions: `rotary`, or `learned` vectors added to the token embeddings.
        norm: `rms`, or `layer`, which has shifts if `bias`.
        norm_placement: `pre`, `post`, `peri`, `out` or `none`, see `Residual`. A final norm precedes
            the readout except for `post`, whose stream is normalised, and `none`.
        residual: `add`, or `routed`, where branches read a learned mixture of all earlier ones, see
            `theodolite.models.routing`; it needs norms `pre` or `peri`.
        qk_norm: normalise queries and keys over the head dimension?
        gated: SwiGLU with 3·width hidden features instead of GELU with 4·width.
        tied: is the readout the token embedding?
        bias: do the linear maps inside the blocks have biases, and LayerNorms shifts? Experts have none.
        experts: 0 for one feed-forward, else the number of feed-forwards in a mixture.
        active: experts for each token.
        scaled_init: GPT-2's factor `1/√(2·depth)` on the initial weights that end a branch.

    Initial values: every weight is `N(0, 1/fan_in)`, biases 0, gains 1. An embedding, read by one-hot
    tokens, is `N(0, 1)`, or `N(0, 1/width)` if it is also the readout. Nothing depends on depth
    unless `scaled_init`.

    A block has 4 matrices of width² and two of 4·width²:

    >>> def parameters(depth):
    ...     return sum(parameter.numel() for parameter in GPT(64, depth, norm_placement="none").parameters())
    >>> (parameters(3) - parameters(2)) / 64**2
    12.0

    References:
        Radford et al., Language models are unsupervised multitask learners, 2019.
    """

    def __init__(
        self,
        width: int,
        depth: int,
        *,
        vocab: int = 256,
        context: int = 256,
        head_dim: int = 32,
        kv_heads: int | None = None,
        positions: Positions = "rotary",
        norm: NormKind = "rms",
        norm_placement: Placement = "pre",
        residual: Stream = "add",
        qk_norm: bool = False,
        gated: bool = False,
        tied: bool = False,
        bias: bool = False,
        experts: int = 0,
        active: int = 2,
        scaled_init: bool = False,
    ) -> None:
        super().__init__()
        Size(width, depth)
        for name, value in {"vocab": vocab, "context": context, "head_dim": head_dim}.items():
            whole(name, value, least=1)
        one_of("positions", positions, get_args(Positions))
        one_of("norm_placement", norm_placement, get_args(Placement))
        one_of("residual", residual, get_args(Stream))
        if residual == "routed":
            require_routable(norm_placement)
        if positions == "rotary":
            multiple("head_dim", head_dim, 2, "rotary positions turn pairs of dimensions")
        self.context = context
        self.head_dim = head_dim
        make = make_norm(norm, shift=bias)

        self.embed = nn.Embedding(vocab, width)
        self.position = nn.Embedding(context, width) if positions == "learned" else None
        self.blocks = nn.ModuleList()
        for place in range(depth):
            attention = Attention(
                width, head_dim=head_dim, kv_heads=kv_heads, bias=bias, qk_norm=make if qk_norm else None
            )
            feed_forward = (
                Experts(width, experts=experts, active=active, gated=gated)
                if experts
                else FeedForward(width, gated=gated, bias=bias)
            )
            if residual == "routed":
                heads = Routed(attention, width, norm_placement, make, first=place == 0)
                self.blocks.append(Block(heads, Routed(feed_forward, width, norm_placement, make)))
            else:
                branches = (Residual(one, width, norm_placement, make) for one in (attention, feed_forward))
                self.blocks.append(Block(*branches))
        self.route = Route(width) if residual == "routed" else None
        self.norm = nn.Identity() if norm_placement in ("post", "none") else make(width)
        self.readout = nn.Linear(width, vocab, bias=False)

        self._initialise(tied=tied, branch_end=(2 * depth) ** -0.5 if scaled_init else 1.0)
        if tied:
            self.readout.weight = self.embed.weight

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Logits (B, T, V) of the token after each position."""
        length = tokens_BT.shape[-1]
        if length > self.context:
            raise UseError(
                f"a sequence has {length} tokens, context is {self.context}: build with context={length}"
            )
        x_BTD = self.embed(tokens_BT)
        rotation = None
        if self.position is None:
            rotation = make_rotation(length, self.head_dim, like=x_BTD)
        else:
            x_BTD = x_BTD + self.position(torch.arange(length, device=tokens_BT.device))
        return self.readout(self.norm(self._streamed(x_BTD, rotation)))

    def _streamed(self, x_BTD: Tensor, rotation: Rotation | None) -> Tensor:
        """The stream after all blocks, or a mixture of their outputs."""
        if self.route is None:
            for block in self.blocks:
                x_BTD = block(x_BTD, rotation)
            return x_BTD
        history = History((), ()).then(x_BTD)
        for block in self.blocks:
            history = block(history, rotation)
        return self.route(history)

    @torch.no_grad()
    def _initialise(self, *, tied: bool, branch_end: float) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=module.embedding_dim**-0.5 if tied else 1.0)
        for module in self.modules():
            if isinstance(module, Attention):
                module.out.weight.mul_(branch_end)
            elif isinstance(module, FeedForward):
                module.down.weight.mul_(branch_end)
            elif isinstance(module, Experts):
                module.down.mul_(branch_end)


class Block(nn.Module):
    """Attention, then feed-forward, each a branch that is added (`Residual`) or routed (`Routed`).

    >>> Block(nn.Identity(), nn.Tanh())(torch.zeros(1, 1, 4))
    tensor([[[0., 0., 0., 0.]]])
    """

    def __init__(self, attention: nn.Module, feed_forward: nn.Module) -> None:
        super().__init__()
        self.attention = attention
        self.feed_forward = feed_forward

    def forward(self, x: Any, *rest: Any) -> Any:
        """The stream, or the history, after both branches; the first one gets further arguments."""
        return self.feed_forward(self.attention(x, *rest))
