"""Networks in the manner of popular repositories, and more of transformers: each described in a few lines.

A description says, for the branches of every block in order: the placement of norms, the number of layers
and what ends it; then which gains are Input-Norms' and which Output-Norms'. `#` stands for a block's number.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable
from contextlib import redirect_stderr
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from theodolite.anatomy import Anatomy, dissect
from theodolite.core.size import Size

WORDS = torch.randint(5, 60, (2, 12), generator=torch.Generator().manual_seed(0))
IMAGES = torch.zeros(2, 3, 32, 32)


class Said(NamedTuple):
    """A description of a network of two blocks."""

    branches: tuple[tuple[str, int, str], ...]
    inputs: str
    """Pattern of the gains of Input-Norms."""
    outputs: str = "(?!)"
    """Pattern of the gains of Output-Norms."""
    blocks: int = 2


def _check(anatomy: Anatomy, said: Said) -> None:
    assert anatomy.num_blocks == said.blocks
    assert anatomy.grown_blocks == 2 * said.blocks
    for block in range(said.blocks):
        found = [
            (branch.placement, branch.layers, "|".join(re.sub(r"\.\d+\.", ".#.", end) for end in branch.ends))
            for branch in anatomy.branches
            if branch.block == block
        ]
        assert len(found) == len(said.branches), found
        for (placement, layers, ends), (p, n, e) in zip(found, said.branches, strict=True):
            assert (placement, layers) == (p, n)
            assert re.fullmatch(e, ends), ends
    for name, part in anatomy.items():
        if part.op == "norm":
            named = re.sub(r"\.\d+\.", ".#.", name)
            wanted = [role for role in ("input", "output") if re.search(getattr(said, f"{role}s"), named)]
            assert wanted == [part.norm], name


# Hand-written.


class NanoGPT(nn.Module):
    """Karpathy's: fused QKV, a mask buffer, logits and loss returned together."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(64, width), nn.Embedding(16, width)
        self.h = nn.ModuleList(NanoBlock(width) for _ in range(depth))
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, 64, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, words: Tensor, targets: Tensor | None = None) -> Any:
        x = self.wte(words) + self.wpe(torch.arange(words.shape[1], device=words.device))
        for block in self.h:
            x = block(x)
        x = self.ln_f(x)
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.view(-1, 64), targets.view(-1))


class NanoBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout()
        )
        self.register_buffer("mask", torch.tril(torch.ones(16, 16)))

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        q, k, v = (y.view(B, T, -1, 8).transpose(1, 2) for y in self.c_attn(self.ln_1(x)).split(C, 2))
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.shape[-1]))
        scores = scores.masked_fill(self.mask[:T, :T] == 0, float("-inf")).softmax(-1)
        x = x + self.c_proj((scores @ v).transpose(1, 2).contiguous().view(B, T, C))
        return x + self.mlp(self.ln_2(x))


NANO = Said(
    (
        ("pre", 2, r"h\.#\.c_proj\.weight\|h\.#\.c_proj\.bias"),
        ("pre", 2, r"h\.#\.mlp\.#\.weight\|h\.#\.mlp\.#\.bias"),
    ),
    inputs=r"ln_[12]",
    outputs="ln_f",
)


@pytest.mark.parametrize("inputs", [WORDS, (WORDS, WORDS)], ids=["logits", "logits and loss"])
def test_nanogpt(inputs: Any) -> None:
    anatomy = dissect(NanoGPT, inputs, size=Size(32, 2))
    _check(anatomy, NANO)
    assert len(anatomy["h.0.c_attn.weight"].rows) == 3
    assert anatomy["wte.weight"].tied == ("lm_head.weight",)


class DiT(nn.Module):
    """A diffusion transformer: norms without gains, shifted, scaled and gated by a condition."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.patch, self.label = nn.Conv2d(3, width, 8, 8), nn.Embedding(5, width)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "modulate": nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width)),
                    "attention": nn.MultiheadAttention(width, width // 8, batch_first=True),
                    "up": nn.Linear(width, 4 * width),
                    "down": nn.Linear(4 * width, width),
                }
            )
            for _ in range(depth)
        )
        self.head = nn.Linear(width, 12)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x, c = self.patch(images).flatten(2).transpose(1, 2), self.label(labels)
        for block in self.blocks:
            a, b, g, d, e, h = block["modulate"](c)[:, None].chunk(6, -1)
            y = F.layer_norm(x, x.shape[-1:]) * (1 + a) + b
            x = x + g * block["attention"](y, y, y, need_weights=False)[0]
            y = F.layer_norm(x, x.shape[-1:]) * (1 + d) + e
            x = x + h * block["down"](F.gelu(block["up"](y)))
        return self.head(F.layer_norm(x, x.shape[-1:]))


def test_dit() -> None:
    ends = (r"blocks\.#\.attention\.out_proj\.weight\|.*bias", r"blocks\.#\.down\.weight\|.*bias")
    anatomy = dissect(DiT, (IMAGES, torch.tensor([1, 2])), size=Size(32, 2))
    _check(anatomy, Said((("pre", 2, ends[0]), ("pre", 2, ends[1])), inputs="(?!)"))
    assert len(anatomy["blocks.0.modulate.1.weight"].rows) == 6
    modulate = anatomy["blocks.0.modulate.1.weight"]
    assert (modulate.block, modulate.branch) == (0, 0)  # both branches read it: it counts to the first
    assert anatomy["label.weight"].role == "input"


class TimedUNet(nn.Module):
    """The network of diffusion models: residual blocks, skips by concatenation, an embedding of time."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(8, 2 * width), nn.SiLU())
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(TimedBlock(width, width) for _ in range(depth))
        self.shrink = nn.Conv2d(width, width, 3, 2, 1)
        self.up = nn.ModuleList(TimedBlock(2 * width, width) for _ in range(depth))
        self.last = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        t, x, kept = self.time(t), self.first(x), []
        for block in self.down:
            x = block(x, t)
            kept.append(x)
        x = F.interpolate(self.shrink(x), scale_factor=2, mode="nearest")
        for block in self.up:
            x = block(torch.cat((x, kept.pop()), 1), t)
        return self.last(x)


class TimedBlock(nn.Module):
    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.n1, self.c1 = nn.GroupNorm(4, before), nn.Conv2d(before, after, 3, padding=1)
        self.t = nn.Linear(2 * after, after)
        self.n2, self.c2 = nn.GroupNorm(4, after), nn.Conv2d(after, after, 3, padding=1)
        self.skip = nn.Conv2d(before, after, 1) if before != after else nn.Identity()

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        y = self.c1(F.silu(self.n1(x))) + self.t(t)[:, :, None, None]
        return self.skip(x) + self.c2(F.silu(self.n2(y)))


def test_unet() -> None:
    anatomy = dissect(TimedUNet, (IMAGES[..., :16, :16], torch.zeros(2, 8)), size=Size(8, 2))
    ends = r"(down|up)\.#\.c2\.weight\|(down|up)\.#\.c2\.bias"
    _check(anatomy, Said((("pre", 2, ends),), inputs="(?!)", outputs="n1|n2", blocks=4))
    assert anatomy["up.0.skip.weight"].branch is None  # the stream itself passes it
    assert anatomy["up.0.t.weight"].block == 2
    assert anatomy["time.0.weight"].role == "input"
    assert anatomy["last.weight"].role == "output"


# From transformers, not among the golden tables.

LLAMA = (("pre", 2, r".*\.o_proj\.weight"), ("pre", 2, r".*\.mlp\.down_proj\.weight"))
PARALLEL = (("pre", 2, r".*\.out_proj\.weight"), ("pre", 2, r".*\.fc_out\.weight\|.*\.bias"))


def _sizes(width: int, depth: int) -> dict[str, Any]:
    return {
        "vocab_size": 64,
        "hidden_size": width,
        "num_hidden_layers": depth,
        "num_attention_heads": width // 16,
        "num_key_value_heads": width // 16,
        "head_dim": 16,
        "intermediate_size": 2 * width,
        "max_position_embeddings": 32,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def _gptj(width: int, depth: int) -> dict[str, Any]:
    return {"vocab_size": 64, "n_embd": width, "n_layer": depth, "n_head": width // 16, "rotary_dim": 8}


def _mla(width: int, depth: int) -> dict[str, Any]:
    own = {
        "q_lora_rank": width // 2,
        "kv_lora_rank": width // 2,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
    }
    return {**_sizes(width, depth), **own, "v_head_dim": 16, "first_k_dense_replace": 99, "head_dim": 8}


def _mamba2(width: int, depth: int) -> dict[str, Any]:
    own = {
        "state_size": 8,
        "num_heads": width // 8,
        "head_dim": 16,
        "n_groups": 1,
        "num_hidden_layers": depth,
    }
    return {"vocab_size": 64, "hidden_size": width, **own}


HF: dict[str, tuple[Callable[[int, int], dict[str, Any]], Said]] = {
    "Qwen2": (_sizes, Said(LLAMA, inputs="norm")),
    "Phi3": (_sizes, Said(LLAMA, inputs="norm")),
    "Granite": (_sizes, Said(LLAMA, inputs="norm")),
    "Gemma": (_sizes, Said(LLAMA, inputs=r"layers.*norm", outputs=r"^model\.norm")),
    "Glm4": (
        _sizes,
        Said(
            (
                ("peri", 2, r".*\.post_self_attn_layernorm\.weight"),
                ("peri", 2, r".*\.post_mlp_layernorm\.weight"),
            ),
            inputs=r"input_layernorm|post_attention_layernorm|^model\.norm",
            outputs=r"post_self_attn|post_mlp",
        ),
    ),
    "GPTJ": (_gptj, Said(PARALLEL, inputs=r"ln_")),
    # MLA: the norms of latents are read by the maps that expand them.
    "DeepseekV3": (_mla, Said((("pre", 3, r".*\.o_proj\.weight"), LLAMA[1]), inputs="norm")),
    # A gated norm before the last map is read by that map alone.
    "Mamba2": (_mamba2, Said((("pre", 3, r".*\.out_proj\.weight"),), inputs="norm")),
}


@pytest.mark.parametrize("name", HF)
def test_a_causal_language_model_of_transformers(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    make, said = HF[name]

    def build(width: int, depth: int) -> nn.Module:
        config = getattr(transformers, f"{name}Config")(**make(width, depth))
        return getattr(transformers, f"{name}ForCausalLM")(config)

    with redirect_stderr(io.StringIO()):
        _check(dissect(build, WORDS, size=Size(32, 2)), said)
