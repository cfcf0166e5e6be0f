"""Networks that blocks can be inserted into, for the tests of the signal: small, in float64."""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, redirect_stderr
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from theodolite.core.batches import Batch
from theodolite.models import GPT, ResNet
from theodolite.workloads import next_token_loss

VOCAB, WIDTH = 16, 16

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2 = {"n_embd": WIDTH, "n_layer": 2, "n_head": 2, "n_positions": 32, "vocab_size": VOCAB}


class Branch(nn.Module):
    """`x + W tanh(Ux)`."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 6), nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        grown: Tensor = self.down(torch.tanh(self.up(x)))
        return x + grown


class Parallel(nn.Module):
    """Two branches of one norm: one ends with a map, one with a bare vector."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.side = nn.Linear(8, 8)
        self.size = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        return x + self.down(F.gelu(self.up(normed))) + self.size * torch.tanh(self.side(normed))


class Maps(nn.Module):
    """A branch that ends with a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(2, 8)
        self.up, self.down = nn.Conv2d(8, 6, 3, padding="same"), nn.Conv2d(6, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        grown: Tensor = self.down(F.gelu(self.up(self.norm(x))))
        return x + grown


class Flat(nn.Module):
    """A branch whose last map is given all positions of all examples in one dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        flat = torch.tanh(self.up(x)).flatten(0, 1)
        return x + self.down(flat).view(x.shape)


class Encoder(nn.TransformerEncoderLayer):
    """Torch's own, whose attention does not call its output map."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__(8, 2, 12, dropout=0.0, norm_first=True, batch_first=batch_first)


class Blocks(nn.Module):
    """Blocks between two maps; with positions first if so wanted."""

    def __init__(self, make: Callable[[], nn.Module], first: nn.Module, *, turned: bool = False) -> None:
        super().__init__()
        self.first, self.turned = first, turned
        self.blocks = nn.ModuleList(make() for _ in range(2))
        self.last = nn.Linear(8, VOCAB)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.turned:
            x = x.transpose(0, 1)
        for block in self.blocks:
            x = block(x)
        if self.turned:
            x = x.transpose(0, 1)
        found: Tensor = self.last(x.mean((2, 3)) if x.ndim == 4 else x)
        return found


def _gpt(**options: Any) -> Callable[[], nn.Module]:
    return lambda: GPT(WIDTH, 2, vocab=VOCAB, context=8, head_dim=8, **options)


def _hugging_face(name: str, head: str = "ForCausalLM", **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        transformers = pytest.importorskip("transformers")
        own = options.get("experts_implementation")
        given = {key: value for key, value in options.items() if key != "experts_implementation"}
        with redirect_stderr(io.StringIO()):
            config = getattr(transformers, f"{name}Config")(**given)
            if own is not None:
                config._experts_implementation = own
            model: nn.Module = getattr(transformers, f"{name}{head}")(config)
        return model

    return make


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "pre": _gpt(),
    "post": _gpt(norm_placement="post"),
    "peri": _gpt(norm_placement="peri", norm="layer", bias=True),
    "out": _gpt(norm_placement="out"),
    "gated": _gpt(gated=True, bias=True, norm="layer"),
    "experts": _gpt(experts=3),
    "parallel": lambda: Blocks(Parallel, nn.Embedding(VOCAB, 8)),
    "flat": lambda: Blocks(Flat, nn.Embedding(VOCAB, 8)),
    "encoder": lambda: Blocks(lambda: Encoder(True), nn.Embedding(VOCAB, 8)),
    "turned encoder": lambda: Blocks(lambda: Encoder(False), nn.Embedding(VOCAB, 8), turned=True),
    "maps": lambda: Blocks(Maps, nn.Conv2d(3, 8, 1)),
    "resnet": lambda: ResNet(4, 1, outputs=VOCAB),
    "Llama": _hugging_face("Llama", **SIZES),
    "Gemma2": _hugging_face("Gemma2", **SIZES),
    "GPT2": _hugging_face("GPT2", "LMHeadModel", **GPT2),
    "Mixtral": _hugging_face("Mixtral", **SIZES, num_local_experts=3, experts_implementation="eager"),
}


def network(name: str) -> nn.Module:
    """One of them, everything but its matrices moved at random."""
    torch.manual_seed(1)
    model = NETWORKS[name]()
    with torch.no_grad():
        for tensor in model.parameters():
            if tensor.dim() < 2:
                tensor.add_(0.3 * torch.randn_like(tensor))
        for tensor in model.buffers():  # statistics of batches
            if tensor.is_floating_point() and name == "resnet":
                tensor.add_(torch.rand_like(tensor))
    return model.double()


def batch_for(name: str, examples: int, seed: int = 0) -> Batch:
    """Units for it."""
    generator = torch.Generator().manual_seed(seed)
    if name in ("maps", "resnet"):
        images = torch.randn(examples, 3, 6, 6, generator=generator, dtype=torch.float64)
        return images, torch.randint(VOCAB, (examples,), generator=generator)
    tokens = torch.randint(VOCAB, (examples, 7), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def loss_for(name: str) -> Callable[[Tensor, Tensor], Tensor]:
    """Of its logits."""
    return F.cross_entropy if name in ("maps", "resnet") else next_token_loss


def exactly(name: str) -> AbstractContextManager[Any]:
    """Networks of transformers compute norms in float32 whatever they are in: here in float64."""
    return Double() if name[0].isupper() else nullcontext()


class Double(TorchFunctionMode):
    """Casts to float32 are casts to float64."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        wide = [torch.float64 if one is torch.float32 else one for one in args]
        named = {key: torch.float64 if one is torch.float32 else one for key, one in (kwargs or {}).items()}
        return (torch.Tensor.double if func is torch.Tensor.float else func)(*wide, **named)
