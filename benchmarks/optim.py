"""A step of Muon against `torch.optim.Muon`: time, memory, and what two processes say to each other.

    python benchmarks/optim.py                   on one thread of the CPU
    python benchmarks/optim.py --device cuda     on a GPU, beside the products alone

The weights are those of a GPT, of width d: for each block (3d, d), (d, d), (4d, d) and (d, 4d), in float32.
Contenders take turns, and medians are compared. The floor is the time that the multiplications of
Newton–Schulz would take at the rate of one large product in bfloat16. Extra memory is the peak during a step,
above what weights, gradients and momenta take. Collectives are counted in two gloo processes, without a GPU.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from theodolite.optimizers import Muon

SIZES = {"cuda": ((256, 12), (768, 12), (1024, 24)), "cpu": ((64, 4), (128, 4), (256, 2), (512, 1))}
TARGETS = {("cuda", 256): 6.0, ("cuda", 768): 3.0, ("cuda", 1024): 3.0, "cpu": 1 / 1.1, "floor": 2.5}
ROUNDS = {"cuda": 15, "cpu": 7}


def shapes(width: int, depth: int) -> list[tuple[int, int]]:
    """Of the matrices of a GPT's blocks."""
    return [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)] * depth


def weights(width: int, depth: int, device: str) -> list[nn.Parameter]:
    """Random ones, with gradients."""
    torch.manual_seed(0)
    made = [nn.Parameter(torch.randn(shape, device=device)) for shape in shapes(width, depth)]
    for weight in made:
        weight.grad = torch.randn_like(weight)
    return made


def thirds(width: int) -> tuple[tuple[tuple[int, int]], ...]:
    """Queries, keys and values."""
    return tuple((((place * width, (place + 1) * width),)) for place in range(3))


def ours(params: list[nn.Parameter], **options: Any) -> Muon:
    return Muon(params, lr=1e-3, weight_decay=0.1, scale="rms", **options)


def apart(params: list[nn.Parameter], width: int) -> Muon:
    """Queries, keys and values as matrices of their own."""
    fused = [param for param in params if param.shape == (3 * width, width)]
    others = [param for param in params if param.shape != (3 * width, width)]
    return ours([{"params": fused, "rows": thirds(width)}, {"params": others}])


def torchs(params: list[nn.Parameter]) -> Optimizer:
    return torch.optim.Muon(params, lr=1e-3, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")


def turns(contenders: dict[str, Callable[[], Any]], rounds: int, device: str) -> dict[str, float]:
    """Median milliseconds of each, of the CPU's own time there; two rounds are not counted."""
    clock = time.perf_counter if device == "cuda" else time.process_time
    taken: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds + 2):
        for name, work in contenders.items():
            wait(device)
            start = clock()
            work()
            wait(device)
            taken[name].append(1e3 * (clock() - start))
    return {name: statistics.median(each[2:]) for name, each in taken.items()}


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def rate() -> float:
    """Multiplications in a millisecond of one large product in bfloat16."""
    large = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    return 8192.0**3 / turns({"": lambda: large @ large}, 10, "cuda")[""]


def products(width: int, depth: int) -> float:
    """Multiplications of five steps of Newton–Schulz for all matrices."""
    sides = [sorted(shape) for shape in shapes(width, depth)]
    return 5.0 * sum(2 * short * short * long + short**3 for short, long in sides)


def extra(optimizer: Optimizer) -> float:
    """Bytes at the peak of a step, above what was there before."""
    optimizer.step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    optimizer.step()
    torch.cuda.synchronize()
    return float(torch.cuda.max_memory_allocated() - before)


def steps(device: str) -> None:
    per_millisecond = rate() if device == "cuda" else 0.0
    if per_millisecond:
        print(f"{torch.cuda.get_device_name()}: {2e-9 * per_millisecond:.0f} TFLOP/s of bfloat16")
    for width, depth in SIZES[device]:
        makes: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
            "torch": torchs,
            "ours": ours,
            "rows": lambda params, width=width: apart(params, width),
        }
        made = {name: make(weights(width, depth, device)) for name, make in makes.items()}
        unchecked = ours(weights(width, depth, device))
        unchecked.check_gradients = False
        made["unchecked"] = unchecked
        found = turns({name: one.step for name, one in made.items()}, ROUNDS[device], device)
        ratio, wanted = found["torch"] / found["ours"], TARGETS.get((device, width), TARGETS["cpu"])
        print(
            f"{width} × {depth}, {4 * depth} matrices: torch {found['torch']:.2f} ms, ours "
            f"{found['ours']:.2f} ms, {ratio:.2f}× as fast (wanted {wanted:.2g}×: "
            f"{'yes' if ratio >= wanted else 'NO'}); with rows apart {found['rows']:.2f} ms; "
            f"without a look at the gradients {found['unchecked']:.2f} ms"
        )
        if device == "cuda":
            floor = products(width, depth) / per_millisecond
            count = sum(out * into for out, into in shapes(width, depth))
            print(
                f"    floor {floor:.2f} ms: ours {found['ours'] / floor:.2f}×, torch "
                f"{found['torch'] / floor:.2f}×; extra memory ours {extra(made['ours']) / 2**20:.0f} MiB, "
                f"torch {extra(made['torch']) / 2**20:.0f} MiB, weights {4 * count / 2**20:.0f} MiB"
            )
        del made, unchecked


class Counted(TorchDispatchMode):
    """Counts what goes between processes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        if func.namespace in ("c10d", "_c10d_functional") and not name.startswith("wait"):
            self.calls[name] += 1
        return func(*args, **(kwargs or {}))


def process(folder: str, rank: int) -> None:
    """One of two: the same network alone, replicated and in shards."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.debug import CommDebugMode

    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=120))
    width, depth = 128, 4

    def network() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(into, out, bias=False) for out, into in shapes(width, depth)))

    def moved(model: nn.Module, optimizer: Optimizer) -> tuple[Counter[str], float, list[torch.Tensor]]:
        seconds = []
        for step in range(4):
            for param in model.parameters():
                whole = torch.randn(param.shape, generator=torch.Generator().manual_seed(step))
                param.grad = _like(whole, param)
            # The first sees what goes between processes directly, the second what DTensor does by itself.
            counted, within = Counted(), CommDebugMode()
            start = time.perf_counter()
            with within, counted:
                optimizer.step()
            seconds.append(time.perf_counter() - start)
        wholes = [_whole(param).detach() for param in model.parameters()]
        calls = counted.calls or Counter({str(call): n for call, n in within.get_comm_counts().items()})
        return calls, statistics.median(seconds), wholes

    alone = network()
    _, _, expected = moved(alone, ours(list(alone.parameters())))
    replica = network()
    sharded = network()
    fully_shard(sharded)
    torch_sharded = network()
    fully_shard(torch_sharded)
    cases = {
        "replicas, ours": (replica, ours(list(replica.parameters()), shared_over=dist.group.WORLD)),
        "shards, ours": (sharded, ours(list(sharded.parameters()))),
        "shards, torch": (torch_sharded, torchs(list(torch_sharded.parameters()))),
    }
    for name, (model, optimizer) in cases.items():
        calls, seconds, found = moved(model, optimizer)
        off = max(float((a - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True))
        if rank == 0:
            said = ", ".join(f"{count} {call}" for call, count in sorted(calls.items())) or "none"
            print(
                f"{name}: {sum(calls.values())} collectives in a step of {4 * depth} matrices ({said}), "
                f"{1e3 * seconds:.0f} ms, off by {off:.1e} from one process"
            )
    dist.destroy_process_group()


def _like(whole: torch.Tensor, param: Any) -> torch.Tensor:
    if not hasattr(param, "full_tensor"):
        return whole
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole, param.device_mesh, param.placements)


def _whole(param: Any) -> torch.Tensor:
    return param.full_tensor() if hasattr(param, "full_tensor") else param


def processes() -> None:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-W", "ignore", __file__, "--folder", folder, "--rank"]
        both = [subprocess.Popen([*command, str(rank)]) for rank in range(2)]
        for one in both:
            one.wait()
        if any(one.returncode for one in both):
            sys.exit("a process failed")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank is not None:
        process(given.folder, given.rank)
    else:
        torch.set_num_threads(1)
        steps(given.device)
        if given.device == "cpu":
            processes()
