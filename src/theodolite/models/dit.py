"""`DiT`, a diffusion transformer: patches of an image, modulated by a time and a class."""

# B batch, C channels, H height, W width in pixels, T patches, P patch side, D width

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from theodolite.core.arguments import multiple, one_of, whole
from theodolite.core.errors import UseError
from theodolite.core.size import Size
from theodolite.models.conditioning import Conditioning, initialise
from theodolite.models.routing import History, Route
from theodolite.models.transformer import EPS, Attention, FeedForward

Modulation = Literal["zero", "random"]
DiTStream = Literal["add", "routed", "time-routed"]


class DiT(nn.Module):
    """Predicts the velocity, or the noise, of an image: (B, C, H, W) and times (B,) to (B, C, H, W).

    Each of `depth` blocks has two branches, attention over all patches and feed-forward:

        x ← x + g·f((1 + a)·N x + b)        (b, a, g) = W silu(c(t, label)) + bias

    with a norm N that has no gain. Shift b, scale a and gate g depend on the condition c alone and are the
    same for every patch.

    Args:
        width: features D of the stream.
        depth: number of blocks.
        channels: of the image.
        side: its height and width in pixels.
        patch: side of a patch; `side` must be a multiple of it.
        classes: number of labels; the label `classes` stands for none. 0: no labels.
        head_dim: dimension of each head; `width` must be a multiple of it.
        times: 1 for a velocity `v_t(x)`, 2 for a flow map `v_{s,t}(x)` (see `theodolite.flows`).
        modulation: how the weights that make shifts, scales and gates start, and those of the readout:
            `zero` (adaLN-Zero: every block is the identity, and the output 0), or `random` like all others.
        residual: `add`; `routed`, where branches read a learned mixture of all earlier ones (see
            `theodolite.models.routing`); or `time-routed`, where the mixture also depends on the condition.

    Initial values: every weight is `N(0, 1/fan_in)`, biases 0, labels `N(0, 1)`, except as `modulation` says.
    Nothing depends on depth. Positions are fixed sines and cosines.

    >>> model = DiT(32, 2, side=8, patch=2)
    >>> model(torch.randn(3, 1, 8, 8), torch.rand(3), torch.tensor([0, 1, 10])).abs().max()
    tensor(0., grad_fn=<...>)

    References:
        Peebles, Xie, Scalable diffusion models with transformers, 2023.
    """

    def __init__(
        self,
        width: int,
        depth: int,
        *,
        channels: int = 1,
        side: int = 28,
        patch: int = 4,
        classes: int = 10,
        head_dim: int = 32,
        times: int = 1,
        modulation: Modulation = "zero",
        residual: DiTStream = "add",
    ) -> None:
        super().__init__()
        Size(width, depth)
        for name, value in {"channels": channels, "side": side, "patch": patch}.items():
            whole(name, value, least=1)
        one_of("modulation", modulation, get_args(Modulation))
        one_of("residual", residual, get_args(DiTStream))
        multiple("side", side, patch, "an image is cut into patches")
        multiple("width", width, 4, "a position is two pairs of sine and cosine for each frequency")
        self.side, self.patch, self.channels = side, patch, channels
        self.embed = nn.Linear(channels * patch**2, width)
        self.condition = Conditioning(width, classes=classes, times=times)
        self.blocks = nn.ModuleList(
            ModulatedBlock(
                ModulatedBranch(
                    Attention(width, head_dim=head_dim, causal=False),
                    width,
                    _route(residual, width) if place else None,
                ),
                ModulatedBranch(FeedForward(width), width, _route(residual, width)),
            )
            for place in range(depth)
        )
        self.route = _route(residual, width)
        self.modulation = nn.Linear(width, 2 * width)
        self.readout = nn.Linear(width, channels * patch**2)
        initialise(self)
        if modulation == "zero":
            branches = [module for module in self.modules() if isinstance(module, ModulatedBranch)]
            for layer in (*(branch.modulation for branch in branches), self.modulation, self.readout):
                nn.init.zeros_(layer.weight)

    def forward(self, x_BCHW: Tensor, t: Tensor, label_B: Tensor | None = None) -> Tensor:
        """The velocity of the image; `t` has one time for each example, or two for a flow map."""
        shape = (self.channels, self.side, self.side)
        if tuple(x_BCHW.shape[1:]) != shape:
            raise UseError(
                f"an image has the shape {tuple(x_BCHW.shape[1:])}, the network was built for {shape}: build "
                "with other channels and side"
            )
        patches_BTI = F.pixel_unshuffle(x_BCHW, self.patch).flatten(2).transpose(1, 2)
        x_BTD = self.embed(patches_BTI)
        x_BTD = x_BTD + grid_positions(self.side // self.patch, x_BTD)
        condition_BD = F.silu(self.condition(t, label_B))
        stream: Any = x_BTD if self.route is None else History((), ()).then(x_BTD)
        for block in self.blocks:
            stream = block(stream, condition_BD)
        h_BTD = stream if self.route is None else self.route(stream, condition_BD)
        shift_B1D, scale_B1D = self.modulation(condition_BD)[:, None].chunk(2, -1)
        out_BTI = self.readout(_normalised(h_BTD) * (1 + scale_B1D) + shift_B1D)
        grid = (self.side // self.patch,) * 2
        return F.pixel_shuffle(out_BTI.transpose(1, 2).unflatten(2, grid), self.patch)


class ModulatedBlock(nn.Module):
    """Attention, then feed-forward, each with its own modulation."""

    def __init__(self, attention: ModulatedBranch, feed_forward: ModulatedBranch) -> None:
        super().__init__()
        self.attention = attention
        self.feed_forward = feed_forward

    def forward(self, stream: Any, condition_BD: Tensor) -> Any:
        """The stream, or the history, after both branches."""
        return self.feed_forward(self.attention(stream, condition_BD), condition_BD)


class ModulatedBranch(nn.Module):
    """`g·f((1 + a)·N h + b)`, with shift b, scale a and gate g from a condition.

    Args:
        branch: the module f.
        width: features of the stream and of the condition.
        route: mixes the history that the branch reads; None where the stream is a sum, and for the first
            branch, before which there is only the embedding.
    """

    def __init__(self, branch: nn.Module, width: int, route: Route | None = None) -> None:
        super().__init__()
        self.route = route
        self.modulation = nn.Linear(width, 3 * width)
        self.branch = branch

    def forward(self, stream: Any, condition_BD: Tensor) -> Any:
        """The stream with the branch added, or the history with its output."""
        if not isinstance(stream, History):
            return stream + self._added(stream, condition_BD)
        h_BTD = stream.values[0] if self.route is None else self.route(stream, condition_BD)
        return stream.then(self._added(h_BTD, condition_BD))

    def _added(self, h_BTD: Tensor, condition_BD: Tensor) -> Tensor:
        shift_B1D, scale_B1D, gate_B1D = self.modulation(condition_BD)[:, None].chunk(3, -1)
        return gate_B1D * self.branch(_normalised(h_BTD) * (1 + scale_B1D) + shift_B1D)


def grid_positions(side: int, like: Tensor) -> Tensor:
    """Sines and cosines of the row and of the column of each patch, (side², D), half of D for each.

    Computed in every forward pass: a buffer would be uninitialised in a model that is built on the meta
    device.

    >>> grid_positions(2, torch.zeros(1, 4)).round(decimals=2)
    tensor([[0.0000, 1.0000, 0.0000, 1.0000],
            [0.0000, 1.0000, 0.8400, 0.5400],
            [0.8400, 0.5400, 0.0000, 1.0000],
            [0.8400, 0.5400, 0.8400, 0.5400]])
    """
    width = like.shape[-1]
    place = torch.arange(side, device=like.device, dtype=torch.promote_types(like.dtype, torch.float32))
    frequencies = 10_000.0 ** (-torch.arange(width // 4, device=like.device, dtype=place.dtype) * 4 / width)
    angles = place[:, None] * frequencies
    axis_SF = torch.cat((angles.sin(), angles.cos()), -1)
    rows = axis_SF[:, None].expand(-1, side, -1)
    columns = axis_SF[None].expand(side, -1, -1)
    return torch.cat((rows, columns), -1).flatten(0, 1).to(like.dtype)


def _normalised(h_BTD: Tensor) -> Tensor:
    return F.layer_norm(h_BTD, h_BTD.shape[-1:], eps=EPS)


def _route(residual: DiTStream, width: int) -> Route | None:
    return None if residual == "add" else Route(width, conditioned=residual == "time-routed")
