"""Networks that carry a state along the sequence, without a nonlinear recurrence."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .exhibit import Exhibit, next_token_loss
from .pieces import HEAD, WIDE, Decoder, PreNorm, SwiGLU, joined, split, text

STATE = 4


class SelectiveScan(nn.Module):
    """Mamba's mixer: time step, input and output matrices of the state depend on the token."""

    def __init__(self, width: int) -> None:
        super().__init__()
        inner, self.rank = 2 * width, width // 8
        self.in_proj = nn.Linear(width, 2 * inner, bias=False)
        self.conv1d = nn.Conv1d(inner, inner, 4, groups=inner, padding=3)
        self.x_proj = nn.Linear(inner, self.rank + 2 * STATE, bias=False)
        self.dt_proj = nn.Linear(self.rank, inner)
        self.A_log = nn.Parameter(torch.arange(1.0, STATE + 1).log().repeat(inner, 1))
        self.D = nn.Parameter(torch.ones(inner))
        self.out_proj = nn.Linear(inner, width, bias=False)
        nn.init.constant_(self.dt_proj.bias, -2.0)

    def forward(self, x: Tensor) -> Tensor:
        """Convolve, scan, gate."""
        x, gate = self.in_proj(x).chunk(2, dim=-1)
        x = F.silu(self.conv1d(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
        rate, read, write = self.x_proj(x).split((self.rank, STATE, STATE), dim=-1)
        step = F.softplus(self.dt_proj(rate))
        decay = torch.exp(step.unsqueeze(-1) * -torch.exp(self.A_log))
        added = (step * x).unsqueeze(-1) * read.unsqueeze(-2)
        state, outputs = torch.zeros_like(added[:, 0]), []
        for place in range(x.shape[1]):
            state = decay[:, place] * state + added[:, place]
            outputs.append((state * write[:, place].unsqueeze(-2)).sum(-1))
        return self.out_proj((torch.stack(outputs, 1) + self.D * x) * F.silu(gate))


class DiagonalStates(nn.Module):
    """S4D: every channel is convolved with a sum of complex exponentials."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.log_step = nn.Parameter(torch.empty(width).uniform_(-3, 0))
        self.log_decay = nn.Parameter(torch.full((width, STATE), 0.5).log())
        self.frequency = nn.Parameter(torch.pi * torch.arange(STATE).repeat(width, 1))
        self.C = nn.Parameter(torch.randn(width, STATE, dtype=torch.cfloat))
        self.D = nn.Parameter(torch.randn(width))
        self.output = nn.Linear(width, 2 * width)

    def forward(self, x: Tensor) -> Tensor:
        """Convolve by FFT, then a gated linear map."""
        length = x.shape[1]
        rates = torch.complex(-torch.exp(self.log_decay), self.frequency)
        turn = rates * torch.exp(self.log_step).unsqueeze(-1)
        powers = torch.exp(turn.unsqueeze(-1) * torch.arange(length, device=x.device))
        weights = self.C * (torch.exp(turn) - 1) / rates
        kernel = 2 * torch.einsum("hn,hnl->hl", weights, powers).real
        signal = x.transpose(1, 2)
        y = torch.fft.irfft(torch.fft.rfft(kernel, 2 * length) * torch.fft.rfft(signal, 2 * length))
        y = y[..., :length] + self.D.unsqueeze(-1) * signal
        return F.glu(self.output(F.gelu(y.transpose(1, 2))))


class TimeMix(nn.Module):
    """RWKV's: each channel is an average of the past that decays at its own rate."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix_k = nn.Parameter(torch.linspace(0, 1, width))
        self.mix_v = nn.Parameter(torch.linspace(0, 1, width))
        self.mix_r = nn.Parameter(torch.linspace(0, 1, width))
        self.time_decay = nn.Parameter(torch.linspace(-3, 1, width))
        self.time_first = nn.Parameter(torch.full((width,), 0.3))
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.receptance = nn.Linear(width, width, bias=False)
        self.output = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Scan."""
        before = F.pad(x, (0, 0, 1, -1))
        k, v, r = (
            each(x * mix + before * (1 - mix))
            for each, mix in ((self.key, self.mix_k), (self.value, self.mix_v), (self.receptance, self.mix_r))
        )
        decay = torch.exp(-torch.exp(self.time_decay))
        total = weight = torch.zeros_like(k[:, 0])
        outputs = []
        for place in range(x.shape[1]):
            now, own = torch.exp(k[:, place]), torch.exp(self.time_first + k[:, place])
            outputs.append((total + own * v[:, place]) / (weight + own))
            total, weight = decay * total + now * v[:, place], decay * weight + now
        return self.output(r.sigmoid() * torch.stack(outputs, 1))


class ChannelMix(nn.Module):
    """RWKV's MLP: a squared ReLU, gated."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix_k = nn.Parameter(torch.linspace(0, 1, width))
        self.key = nn.Linear(width, 4 * width, bias=False)
        self.receptance = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Gate."""
        mixed = x * self.mix_k + F.pad(x, (0, 0, 1, -1)) * (1 - self.mix_k)
        return self.receptance(x).sigmoid() * self.value(F.relu(self.key(mixed)).square())


class Retention(nn.Module):
    """RetNet's: attention without a softmax, which decays by a fixed rate; a norm of each head; a gate."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // HEAD
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, width, bias=False)
        self.v = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, width, bias=False)
        self.o = nn.Linear(width, width, bias=False)
        self.register_buffer("rates", 1 - 2.0 ** -torch.linspace(1, 5, self.heads))

    def forward(self, x: Tensor) -> Tensor:
        """Retain."""
        q, k, v = (split(each(x), self.heads) for each in (self.q, self.k, self.v))
        places = torch.arange(x.shape[1], device=x.device)
        distance = places[:, None] - places
        decay = self.rates[:, None, None] ** distance.clamp(min=0) * (distance >= 0)
        y = F.rms_norm((q @ k.transpose(-1, -2) * HEAD**-0.5 * decay) @ v, (HEAD,))
        return self.o(F.silu(self.gate(x)) * joined(y))


class LinearAttention(Retention):
    """Features of queries and keys instead of a softmax, and a sum by which all is divided."""

    def forward(self, x: Tensor) -> Tensor:
        """Attend."""
        q, k, v = (split(each(x), self.heads) for each in (self.q, self.k, self.v))
        q, k = F.elu(q) + 1, F.elu(k) + 1
        state = torch.einsum("bhtk,bhtv->bhtkv", k, v).cumsum(2)
        total = torch.einsum("bhtk,bhtk->bht", q, k.cumsum(2))
        y = torch.einsum("bhtk,bhtkv->bhtv", q, state) / total.unsqueeze(-1)
        return self.o(self.gate(x).sigmoid() * joined(y))


def mamba(width: int, depth: int) -> nn.Module:
    """One mixer per block."""
    return Decoder(width, depth, lambda w: PreNorm(w, SelectiveScan(w)))


def s4d(width: int, depth: int) -> nn.Module:
    """Diagonal states."""
    return Decoder(width, depth, lambda w: PreNorm(w, DiagonalStates(w), norm=nn.LayerNorm), nn.LayerNorm)


def rwkv(width: int, depth: int) -> nn.Module:
    """Time mix and channel mix."""
    return Decoder(
        width, depth, lambda w: PreNorm(w, TimeMix(w), ChannelMix(w), norm=nn.LayerNorm), nn.LayerNorm
    )


def retnet(width: int, depth: int) -> nn.Module:
    """Retention and SwiGLU."""
    return Decoder(width, depth, lambda w: PreNorm(w, Retention(w), SwiGLU(w)))


def linear_attention(width: int, depth: int) -> nn.Module:
    """Linear attention and SwiGLU."""
    return Decoder(width, depth, lambda w: PreNorm(w, LinearAttention(w), SwiGLU(w)))


BARE = {"embed.weight": "input", "head.weight": "output", "*norm*": "gain"}
ENDS = {"*.bias": "bias", **BARE}

EXHIBITS = [
    Exhibit(
        name="Mamba",
        build=mamba,
        batch=text,
        loss=next_token_loss,
        roles={
            **ENDS,
            "*.conv1d.weight": "input",
            "*.A_log": "gain",
            "*.D": "gain",
            "blocks.*": "hidden",
        },
        branches=2,
        shows="a selective scan as a loop, a depthwise convolution, time constants",
        widths=WIDE,
    ),
    Exhibit(
        name="S4D",
        build=s4d,
        batch=text,
        loss=next_token_loss,
        roles={
            **ENDS,
            "*.output.weight": "hidden",
            "*.C": "input",
            "blocks.*": "gain",
        },
        branches=2,
        shows="complex parameters, a convolution by FFT",
        widths=WIDE,
    ),
    Exhibit(
        name="RWKV",
        build=rwkv,
        batch=text,
        loss=next_token_loss,
        roles={
            **ENDS,
            "*.mix_*": "gain",
            "*.time_decay": "gain",
            "*.time_first": "bias",
            "blocks.*": "hidden",
        },
        branches=4,
        shows="averages of the past that decay at learned rates",
        widths=WIDE,
    ),
    Exhibit(
        name="RetNet",
        build=retnet,
        batch=text,
        loss=next_token_loss,
        roles={**BARE, "blocks.*": "hidden"},
        branches=4,
        shows="retention with fixed rates, a norm of each head",
        widths=WIDE,
    ),
    Exhibit(
        name="Linear attention",
        build=linear_attention,
        batch=text,
        loss=next_token_loss,
        roles={**BARE, "blocks.*": "hidden"},
        branches=4,
        shows="sums over the past instead of a softmax",
        widths=WIDE,
    ),
]
