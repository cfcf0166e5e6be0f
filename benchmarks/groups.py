"""How long and how much memory parameter groups of large ready modules take.

    python benchmarks/groups.py
    python benchmarks/groups.py llama-70b

Each network is built on meta by its library in a process of its own, with one thread; then `th.groups` sorts
its tensors to Muon and AdamW. Nothing is downloaded and no weight is allocated. The memory is what the whole
process had at most, libraries included; beside it what it had before the call. The median of three
processes.
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.utils import logging

import theodolite as th
from theodolite.present.text import Column, Table

LIMIT_SECONDS, LIMIT_GB, PROCESSES = 10, 1, 3
"""The limits are for the first network."""
TOKENS = torch.zeros(1, 16, dtype=torch.long)


def llama_70b() -> nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=8192,
            intermediate_size=28672,
            num_hidden_layers=80,
            num_attention_heads=64,
            num_key_value_heads=8,
            vocab_size=128256,
        )
    )


def llama_405b() -> nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=16384,
            intermediate_size=53248,
            num_hidden_layers=126,
            num_attention_heads=128,
            num_key_value_heads=8,
            vocab_size=128256,
        )
    )


def mixtral_8x22b() -> nn.Module:
    return MixtralForCausalLM(
        MixtralConfig(
            hidden_size=6144,
            intermediate_size=16384,
            num_hidden_layers=56,
            num_attention_heads=48,
            num_key_value_heads=8,
            num_local_experts=8,
        )
    )


def qwen3_235b() -> nn.Module:
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            hidden_size=4096,
            moe_intermediate_size=1536,
            num_hidden_layers=94,
            num_attention_heads=64,
            num_key_value_heads=4,
            head_dim=128,
            num_experts=128,
            num_experts_per_tok=8,
        )
    )


def deepseek_v3() -> nn.Module:
    return DeepseekV3ForCausalLM(DeepseekV3Config())


class Deep(nn.Module):
    """A residual network of a thousand small layers."""

    def __init__(self, width: int = 64, depth: int = 1000) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(8, width), nn.Linear(width, 3)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
            )
            for _ in range(depth)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Three numbers."""
        x = self.enter(x)
        for block in self.blocks:
            x = x + block(x)
        return self.leave(x)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "llama-70b": (llama_70b, TOKENS),
    "llama-405b": (llama_405b, TOKENS),
    "mixtral-8x22b": (mixtral_8x22b, TOKENS),
    "qwen3-235b": (qwen3_235b, TOKENS),
    "deepseek-v3": (deepseek_v3, TOKENS),
    "1000-layers": (Deep, torch.zeros(4, 8)),
}


def peak_gb() -> float:
    """The most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def measure(name: str) -> None:
    """In a process of its own: print what one network takes."""
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    make, inputs = NETWORKS[name]
    start = time.perf_counter()
    with torch.device("meta"):
        model = make()
    built, before = time.perf_counter() - start, peak_gb()
    start = time.perf_counter()
    groups = th.groups(model, inputs, optimizer="muon", lr=0.02, vector_lr=3e-4)
    taken = time.perf_counter() - start
    by_muon = sum(row.rule == "muon" for row in groups.rows.values())
    count = sum(tensor.numel() for tensor in model.parameters())
    print(built, taken, before, peak_gb(), len(groups.rows), by_muon, count)


def one(name: str) -> tuple[float, ...]:
    """What a process of its own measured."""
    done = subprocess.run([sys.executable, __file__, "--one", name], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{name}: {done.stderr}")
    return tuple(map(float, done.stdout.splitlines()[-1].split()))


def main() -> None:
    if sys.argv[1:2] == ["--one"]:
        return measure(sys.argv[2])
    rows: list[tuple[Any, ...]] = []
    late = False
    for name in sys.argv[1:] or NETWORKS:
        runs = [one(name) for _ in range(PROCESSES)]
        built, taken, before, peak, tensors, by_muon, count = map(statistics.median, zip(*runs, strict=True))
        rows.append(
            (
                name,
                f"{count / 1e9:.1f} B" if count > 1e9 else f"{count / 1e6:.0f} M",
                f"{tensors:.0f}",
                f"{by_muon:.0f}",
                f"{taken:.1f} s",
                f"{taken / built:.1f}",
                f"{before:.2f} GB",
                f"{peak:.2f} GB",
            )
        )
        late |= name == "llama-70b" and (taken > LIMIT_SECONDS or peak > LIMIT_GB)
    names = ("parameters", "tensors", "by Muon", "groups", "times its build", "before", "peak")
    print(Table(("network", *(Column(name, side="right") for name in names)), rows))
    print(f"limits of llama-70b: {LIMIT_SECONDS} s and {LIMIT_GB} GB")
    if late:
        sys.exit("over the limit")


if __name__ == "__main__":
    main()
