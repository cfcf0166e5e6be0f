"""Networks whose tensors lists of names send the wrong way: tied, fused, transposed, stacked, kernels."""

import torch
import torch.nn.functional as F
from torch import nn

TOKENS = torch.randint(23, (2, 8), generator=torch.Generator().manual_seed(0))
PIXELS = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
EXPERTS, HIDDEN = 4, 2


class Renamable(nn.Module):
    """Its modules and parameters can have other names than the ones its code uses."""

    def __getattr__(self, name):
        return super().__getattr__(self.__dict__.get("other_names", {}).get(name, name))


def rename(model):
    """The same network, in which every name of a module or parameter of ours means something else."""
    misleading = ("embed", "lm_head", "norm", "gate", "conv", "bias", "qkv")
    for module in model.modules():
        if isinstance(module, Renamable):
            held = [*module._modules, *module._parameters]
            other = {name: f"{misleading[at % 7]}_{at}" for at, name in enumerate(held)}
            module._modules = {other[name]: child for name, child in module._modules.items()}
            module._parameters = {other[name]: one for name, one in module._parameters.items()}
            module.__dict__["other_names"] = other
    return model


class Attention(Renamable):
    """One matrix for queries, keys and values."""

    def __init__(self, width, heads=2):
        super().__init__()
        self.norm, self.heads = nn.LayerNorm(width), heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        queries, keys, values = (
            one.unflatten(-1, (self.heads, -1)).transpose(1, 2) for one in self.qkv(self.norm(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class Transposed(Renamable):
    """A linear map whose weight is stored as (in, out)."""

    def __init__(self, fan_in, fan_out):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(fan_in, fan_out) / fan_in**0.5)

    def forward(self, x):
        return x @ self.weight


class FeedForward(Renamable):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.up, self.down = Transposed(width, HIDDEN * width), Transposed(HIDDEN * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Mixture(Renamable):
    """Experts in two tensors of three dimensions; each token goes to the two that a router chooses."""

    def __init__(self, width):
        super().__init__()
        self.norm, self.router = nn.RMSNorm(width), nn.Linear(width, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, HIDDEN * width, width) / width**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, width, HIDDEN * width) / width**0.5)

    def forward(self, x):
        normed = self.norm(x)
        shares = self.router(normed).softmax(-1)
        top, chosen = shares.topk(2, -1)
        weights = torch.zeros_like(shares).scatter(-1, chosen, top).movedim(-1, 0)
        copies = normed.flatten(0, 1).expand(EXPERTS, -1, -1)
        made = torch.bmm(F.silu(torch.bmm(copies, self.up.mT)), self.down.mT).unflatten(1, x.shape[:2])
        return x + (made * weights[..., None]).sum(0)


class MixedGPT(Renamable):
    """A tied embedding, fused queries, keys and values, transposed weights, and experts."""

    def __init__(self, width=16, depth=1, vocab=23):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocab, width), nn.Embedding(8, width)
        kinds = (Attention, FeedForward, Mixture)
        self.blocks = nn.ModuleList(kind(width) for _ in range(depth) for kind in kinds)
        self.norm, self.readout = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)
        self.readout.weight = self.tokens.weight

    def forward(self, tokens):
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.readout(self.norm(x))


class Convolutions(Renamable):
    """A stem, a residual branch of two kernels, a kernel for each channel, and a readout."""

    def __init__(self, width=8, depth=1):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.wide = nn.Conv2d(width, 2 * width, 3, padding=1, bias=False)
        self.back = nn.Conv2d(2 * width, width, 1, bias=False)
        self.each = nn.Conv2d(width, width, 3, padding=1, groups=width, bias=False)
        self.readout = nn.Linear(width, 5)

    def forward(self, x):
        x = self.stem(x)
        x = x + self.back(F.relu(self.wide(F.relu(self.norm(x)))))
        return self.readout(self.each(x).relu().mean((2, 3)))


class Recurrent(Renamable):
    """An LSTM between an embedding and a readout."""

    def __init__(self, width=16, depth=1):
        super().__init__()
        self.tokens, self.lstm = nn.Embedding(23, width), nn.LSTM(width, width, depth, batch_first=True)
        self.readout = nn.Linear(width, 23)

    def forward(self, tokens):
        return self.readout(self.lstm(self.tokens(tokens))[0])
