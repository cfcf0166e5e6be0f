"""Small networks in float64, one for each kind of layer, with a loss and a batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import theodolite as th

Loss = Callable[[Tensor, Tensor], Tensor]
Batch = tuple[Any, Tensor]

NUM, FEATURES, CLASSES, VOCAB, LENGTH = 6, 5, 3, 7, 4


@dataclass(frozen=True)
class Case:
    """A network with its loss and its batch."""

    model: nn.Module
    loss: Loss
    batch: Batch


def case(name: str) -> Case:
    """The network of that name, always with the same weights and data."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(sum(map(ord, name)))
        made = CASES[name]()
        model = made.model.double()
        # Gains of 1 and shifts of 0 would hide a gain or a shift in the wrong place.
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.data += 0.3 * torch.randn_like(parameter)
    return Case(model, made.loss, made.batch)


class Images(nn.Sequential):
    """Images of 2 channels and 4 × 4 pixels through a convolution and what comes after it."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(nn.Conv2d(2, 4, 3, padding=1), *layers, nn.Conv2d(4, CLASSES, 4), nn.Flatten())


class CausalAttention(nn.Module):
    """Tokens, one causal attention of two heads by the function that has fused kernels, a readout."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.mixed = nn.Linear(width, 3 * width)
        self.readout = nn.Linear(width, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        stream = self.embed(tokens)
        heads = self.mixed(stream).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.readout(stream + attended.transpose(1, 2).flatten(2))


class MultiheadAttention(nn.Module):
    """The same by torch's own module, which runs through another path of that function."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.readout = nn.Linear(width, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        stream = self.embed(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, dtype=stream.dtype)
        attended, _ = self.attention(stream, stream, stream, attn_mask=mask, need_weights=False)
        return self.readout(stream + attended)


class Tied(nn.Module):
    """The readout is the embedding: one parameter under two names."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.hidden = nn.Linear(width, width)
        self.readout = nn.Linear(width, VOCAB, bias=False)
        self.readout.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.readout(self.embed(tokens) + torch.tanh(self.hidden(self.embed(tokens))))


class Squared(torch.autograd.Function):
    """An operation of the user's own, with every derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * grad


class Own(nn.Module):
    """What no torch function is called for: a probe that watches those must not overlook it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "function":
            return torch.tanh(x) + Squared.apply(x)
        if self.how == "operator":
            return torch.ops.aten.sigmoid(x) * x
        if self.how == "in place":
            y = 1 - 2 * x
            y += x.tanh()
            y[:, 1:] *= x[:, :1]
            return y.sub_(x * x)
        if self.how == "out of order":
            return torch.einsum("nf,nf,nk->nk", x, x, torch.cat([x[:, 2:], x[:, :2]], 1).flip(0)).cumsum(1)
        if self.how == "reduced":
            return x * torch.logsumexp(x, 1, keepdim=True) / (1 + x.var(0) + x.norm(dim=1, keepdim=True))
        if self.how == "chosen":
            return torch.where(x > 0, x.exp() - 1, x.sin()) + torch.stack([x, x**3]).amax(0)
        raise ValueError(self.how)


def next_token(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def vectors(*layers: nn.Module, width: int = 5, loss: Loss = F.cross_entropy) -> Case:
    """A perceptron with `layers` between its two linear maps."""
    model = nn.Sequential(nn.Linear(FEATURES, width), *layers, nn.Linear(width, CLASSES))
    inputs = torch.randn(NUM, FEATURES, dtype=torch.float64)
    targets = torch.randn(NUM, CLASSES).double() if loss is F.mse_loss else torch.arange(NUM) % CLASSES
    return Case(model, loss, (inputs, targets))


def images(*layers: nn.Module) -> Case:
    return Case(Images(*layers), F.cross_entropy, (torch.randn(3, 2, 4, 4).double(), torch.arange(3)))


def tokens(model: nn.Module, *, named: bool = False) -> Case:
    drawn = torch.randint(VOCAB, (2, LENGTH + 1))
    inputs = drawn[:, :-1]
    return Case(model, next_token, ({"input_ids": inputs} if named else inputs, drawn[:, 1:]))


def batch_norm(*, train: bool) -> Case:
    made = vectors(norm := nn.BatchNorm1d(5), nn.Tanh())
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2)
    made.model.train(train)
    return made


def residual() -> Case:
    made = vectors()
    return Case(th.models.ResidualMLP(5, 2, inputs=FEATURES, outputs=CLASSES), made.loss, made.batch)


def gpt(**options: Any) -> Case:
    sizes = {"vocab": VOCAB, "context": LENGTH, "head_dim": 2}
    return tokens(th.models.GPT(4, 1, **sizes, **options))


def llama() -> Case:
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    sizes = {"hidden_size": 4, "intermediate_size": 6, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(
        vocab_size=VOCAB, max_position_embeddings=LENGTH, num_key_value_heads=1, **sizes,
        pad_token_id=None, bos_token_id=0, eos_token_id=1, initializer_range=0.5,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    # Its own norms compute in float32, where finite differences are good to three digits only.
    for module in model.modules():
        for name, child in module.named_children():
            if isinstance(child, LlamaRMSNorm):
                setattr(module, name, nn.RMSNorm(4, eps=child.variance_epsilon))
    return tokens(model, named=True)


def gpt2() -> Case:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCAB, n_positions=LENGTH, n_embd=4, n_inner=6, n_layer=1, n_head=2,
        bos_token_id=0, eos_token_id=1, initializer_range=0.5,
    )  # fmt: skip
    return tokens(GPT2LMHeadModel(config).eval())


CASES: dict[str, Callable[[], Case]] = {
    "tanh": lambda: vectors(nn.Tanh()),
    "softplus": lambda: vectors(nn.Softplus()),
    "gelu": lambda: vectors(nn.GELU()),
    "silu": lambda: vectors(nn.SiLU()),
    "relu": lambda: vectors(nn.ReLU()),
    "own function": lambda: vectors(Own("function")),
    "own operator": lambda: vectors(Own("operator")),
    "in place": lambda: vectors(Own("in place")),
    "out of order": lambda: vectors(Own("out of order")),
    "reduced": lambda: vectors(Own("reduced")),
    "chosen": lambda: vectors(Own("chosen")),
    "mean square": lambda: vectors(nn.Tanh(), loss=F.mse_loss),
    "layer norm": lambda: vectors(nn.LayerNorm(5), nn.Tanh()),
    "rms norm": lambda: vectors(nn.RMSNorm(5), nn.SiLU()),
    "batch norm, train": lambda: batch_norm(train=True),
    "batch norm, eval": lambda: batch_norm(train=False),
    # torch._weight_norm has a wrong second derivative (its own gradgradcheck fails on it).
    "weight norm": lambda: vectors(weight_norm(nn.Linear(5, 5)), nn.Tanh()),
    "dropout": lambda: vectors(nn.Tanh(), nn.Dropout(0.4)),
    "convolution": lambda: images(nn.Softplus()),
    "group norm": lambda: images(nn.GroupNorm(2, 4), nn.GELU()),
    "batch norm of images": lambda: images(nn.BatchNorm2d(4), nn.Tanh()),
    "causal attention": lambda: tokens(CausalAttention()),
    "multihead attention": lambda: tokens(MultiheadAttention()),
    "tied": lambda: tokens(Tied()),
    "residual": residual,
    "gpt": gpt,
    "llama": llama,
    "gpt2": gpt2,
}
