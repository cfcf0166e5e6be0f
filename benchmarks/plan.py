"""What a plan costs: a step of its optimizer against a plain one, its groups, and a plan for 70 billion.

    python benchmarks/plan.py
    python benchmarks/plan.py cuda

Steps are timed in turns, plan and plain, on copies of one network; on a GPU AdamW is the fused one, as
otherwise it is the launches of its kernels that are timed, group by group. Planning allocates the base
network only: the 70B configuration is never built with weights.
"""

from __future__ import annotations

import copy
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch.optim import Optimizer
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

import theodolite as th
from theodolite.optimizers import Muon

TOKENS = torch.zeros(1, 8, dtype=torch.long)
RATIO, GROUPS, SECONDS = 1.05, 16, 60


def gpt(width: int, depth: int) -> torch.nn.Module:
    return th.models.GPT(width, depth, vocab=4096, bias=True, norm="layer")


def llama(width: int, depth: int) -> torch.nn.Module:
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


def adamw_options(device: str) -> dict[str, bool]:
    return {"fused": True} if device == "cuda" else {}


def plain_adamw(model: torch.nn.Module) -> Callable[[], None]:
    options = adamw_options(next(model.parameters()).device.type)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, **options)
    return lambda: optimizer.step()


def plain_pair(model: torch.nn.Module) -> Callable[[], None]:
    matrices, others = [], []
    for name, param in model.named_parameters():
        (matrices if param.ndim == 2 and name.startswith("blocks.") else others).append(param)
    muon = Muon(matrices, lr=1e-3, weight_decay=0.1, scale="rms")
    adamw = torch.optim.AdamW(others, lr=1e-3, weight_decay=0.1, **adamw_options(others[0].device.type))

    def step() -> None:
        muon.step()
        adamw.step()

    return step


def seconds(step: Callable[[], object], device: str, repetitions: int) -> float:
    start = time.perf_counter()
    for _ in range(repetitions):
        step()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / repetitions


def compare(
    rule: str, plain: Callable[[torch.nn.Module], Callable[[], None]], device: str
) -> tuple[float, int]:
    options = "options" if rule == "adamw" else "vector_options"
    plan = th.plan(
        gpt,
        TOKENS,
        size=th.Size(256, 12),
        base=th.Size(64, 2),
        optimizer=rule,
        lr=1e-3,
        weight_decay=0.1,
        **{options: adamw_options(device)},
    )
    model = gpt(256, 12).to(device)
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    twin = copy.deepcopy(model)
    for param, other in zip(model.parameters(), twin.parameters(), strict=True):
        other.grad = param.grad.clone()  # type: ignore[union-attr]
    planned: Optimizer = plan.optimizer(model)
    steps: dict[str, Callable[[], object]] = {"plain": plain(twin), "planned": planned.step}
    times: dict[str, list[float]] = {name: [] for name in steps}
    # A step of Muon is dear on a CPU.
    turns, repetitions = (31, 20) if device == "cuda" else (31, 3) if rule == "adamw" else (9, 1)
    for turn in range(turns):
        # Who comes first changes from turn to turn; the first turn warms up.
        for name in sorted(steps, reverse=turn % 2 == 0):
            taken = seconds(steps[name], device, repetitions)
            if turn:
                times[name].append(taken)
    ratio = statistics.median(
        mine / theirs for mine, theirs in zip(times["planned"], times["plain"], strict=True)
    )
    planned_ms, plain_ms = (1e3 * statistics.median(times[name]) for name in ("planned", "plain"))
    groups = len(planned.param_groups)
    print(
        f"{rule:10} 12-layer GPT of width 256 on {device}: {groups} groups (limit {GROUPS}), a step takes "
        f"{planned_ms:.2f} ms, plain {plain_ms:.2f} ms: ratio {ratio:.3f} (limit {RATIO})"
    )
    return ratio, groups


def main() -> None:
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    device = sys.argv[1] if len(sys.argv) > 1 else "cpu"
    pairs = [compare("adamw", plain_adamw, device), compare("muon-kimi", plain_pair, device)]
    start = time.perf_counter()
    plan = th.plan(llama, TOKENS, size=th.Size(8192, 80), base=th.Size(1024, 8), lr=1e-3, weight_decay=0.1)
    taken = time.perf_counter() - start
    groups = len(plan.param_groups(hollow(8192, 80)))
    print(
        f"Llama-3-70B planned in {taken:.1f} s (limit {SECONDS}): {len(plan.rows)} tensors in {groups} groups"
    )
    if taken > SECONDS or groups > GROUPS or any(ratio > RATIO or count > GROUPS for ratio, count in pairs):
        sys.exit("over the limit")


def hollow(width: int, depth: int) -> torch.nn.Module:
    with torch.device("meta"):
        return llama(width, depth)


if __name__ == "__main__":
    main()
