"""How long and how much memory it takes to dissect a Llama of 70 billion parameters.

    python benchmarks/anatomy.py

Nothing is downloaded and no weight is allocated: the configuration below is Llama-3-70B's.
"""

from __future__ import annotations

import resource
import sys
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

import theodolite as th


def build(width: int, depth: int) -> torch.nn.Module:
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=28672 * width // 8192,
        num_hidden_layers=depth,
        num_attention_heads=width // 128,
        num_key_value_heads=8,
        vocab_size=128256,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def main() -> None:
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    start = time.perf_counter()
    anatomy = th.dissect(build, torch.zeros(1, 8, dtype=torch.long), size=th.Size(8192, 80))
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(anatomy)
    print(f"\ndissected in {seconds:.1f} s (limit 30), peak memory of the process {peak:.2f} GB (limit 2)")
    if seconds > 30 or peak > 2:
        sys.exit("over the limit")


if __name__ == "__main__":
    main()
