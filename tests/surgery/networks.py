"""Networks for the tests of surgery, small, with gains and biases that are not one and zero."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, redirect_stderr
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from theodolite.models import GPT

TOKENS = torch.randint(3, 60, (2, 6), generator=torch.Generator().manual_seed(0))

GPTS: dict[str, dict[str, Any]] = {
    "gpt": {},
    "gpt gated": {"gated": True, "qk_norm": True, "kv_heads": 1},
    "gpt layer": {"norm": "layer", "bias": True, "positions": "learned", "gated": True},
    "gpt peri": {"norm_placement": "peri", "norm": "layer", "bias": True},
    "gpt post": {"norm_placement": "post"},
    "gpt out": {"norm_placement": "out"},
    "gpt tied": {"tied": True},
    "gpt experts": {"experts": 3, "gated": True},
}

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

HF: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen3": {},
    "Gemma2": {},
    "Olmo2": {},
    "GPT2": {"n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 32},
    "GPTNeoX": {},
    "Mixtral": {"num_local_experts": 3, "experts_implementation": "eager"},
}

NETWORKS = (*GPTS, *HF)


def network(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    """One of them, with gains, shifts and biases that are not those of initialisation."""
    torch.manual_seed(1)
    if name in GPTS:
        model: nn.Module = GPT(32, 1, vocab=64, head_dim=16, **GPTS[name])
    else:
        model = hugging_face(name, **SIZES, **HF[name])
    return moved(model).to(dtype)


def hugging_face(name: str, **options: Any) -> nn.Module:
    """A causal language model of transformers; tests are skipped without that package."""
    transformers = pytest.importorskip("transformers")
    own = options.pop("experts_implementation", None)
    with redirect_stderr(io.StringIO()):
        config = getattr(transformers, f"{name}Config")(**options)
        if own is not None:
            config._experts_implementation = own
        head = f"{name}LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM"
        model: nn.Module = getattr(transformers, head)(config)
    return model.eval()


def moved(model: nn.Module, by: float = 0.3) -> nn.Module:
    """The model, everything but its matrices changed at random."""
    with torch.no_grad():
        for tensor in model.parameters():
            if tensor.dim() < 2:
                tensor.add_(by * torch.randn_like(tensor))
    return model


def logits(model: nn.Module, inputs: Any = TOKENS) -> Tensor:
    """What the network says."""
    made = model(**inputs) if isinstance(inputs, Mapping) else model(inputs)
    found: Tensor = made if isinstance(made, Tensor) else made.logits
    return found


def gradients(model: nn.Module, inputs: Any = TOKENS) -> tuple[Tensor, dict[str, Tensor]]:
    """Outputs, and the gradients of a sum of them with fixed random signs, by name."""
    made = logits(model, inputs)
    signs = torch.randn(made.shape, generator=torch.Generator().manual_seed(2)).to(made)
    named = {name: one for name, one in model.named_parameters() if one.requires_grad}
    found = torch.autograd.grad((made * signs).sum(), list(named.values()), allow_unused=True)
    return made.detach(), {name: one for name, one in zip(named, found, strict=True) if one is not None}


def train(model: nn.Module, steps: int = 2, lr: float = 0.01) -> nn.Module:
    """The model after a few steps that move everything by a percent of its size, vectors more."""
    for _ in range(steps):
        _, slopes = gradients(model)
        with torch.no_grad():
            for name, tensor in model.named_parameters():
                if name in slopes:
                    size = tensor.norm() / slopes[name].norm().clamp(min=1e-12)
                    tensor.sub_(lr * (1 if tensor.dim() > 1 else 10) * size * slopes[name])
    return model


def apart(one: Tensor, other: Tensor) -> float:
    """Their largest difference, in parts of the second."""
    return float((one.double() - other.double()).abs().max() / other.double().abs().max().clamp(min=1e-30))


def exactly(name: str) -> AbstractContextManager[Any]:
    """Networks of transformers, which compute norms in float32 whatever they are in, do so in float64."""
    return Double() if name in HF else nullcontext()


class Double(TorchFunctionMode):
    """Casts to float32 are casts to float64."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        wide = [torch.float64 if one is torch.float32 else one for one in args]
        named = {key: torch.float64 if one is torch.float32 else one for key, one in (kwargs or {}).items()}
        return (torch.Tensor.double if func is torch.Tensor.float else func)(*wide, **named)


class Branch(nn.Module):
    """`x + m·f(N x)`, m = 1/L if so wanted."""

    def __init__(self, width: int, factor: float = 1.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        """The stream after it."""
        return x + self.factor * self.down(torch.tanh(self.up(self.norm(x))))


class Stack(nn.Module):
    """Blocks in a list between two maps."""

    def __init__(self, width: int, depth: int, *, divided: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, width), nn.Linear(width, 3)
        self.blocks = nn.ModuleList(Branch(width, 1 / depth if divided else 1.0) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        """Outputs."""
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)
