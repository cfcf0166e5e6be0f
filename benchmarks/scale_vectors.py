"""What scale vectors cost: a network with them against the plain one, and against itself folded back.

    python benchmarks/scale_vectors.py                   a small one on one thread of the CPU, to see it run
    python benchmarks/scale_vectors.py --device cuda     512 × 8 and 1024 × 12 on a GPU

Three networks take turns in one process: plain; converted, with the default form of scale vectors (γ and b
for each map, magnitude and direction); and folded, which was converted and folded back. All run under
`torch.compile`, on the GPU with bfloat16 autocast over float32 weights and fused AdamW. A step is forward,
backward and optimizer; a pass is forward without gradients. Medians are compared. Folded and plain are the
same program, so their ratio says how far the clock can be trusted.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import theodolite as th

SIZES = {"cuda": ((512, 8), (1024, 12)), "cpu": ((128, 2),)}
BATCH = {"cuda": (16, 1024), "cpu": (8, 64)}
ROUNDS = {"cuda": 21, "cpu": 9}
EACH = {"cuda": 3, "cpu": 2}
MODE = "default"
TARGETS = {"converted": 1.05, "folded": 1.01}


def contenders(width: int, depth: int, device: str) -> dict[str, nn.Module]:
    """Three networks that compute one function."""
    torch.manual_seed(0)
    plain = th.models.GPT(width, depth, head_dim=64, context=BATCH[device][1]).to(device)
    with torch.no_grad():
        for tensor in plain.parameters():
            if tensor.dim() == 1:  # gains
                tensor.normal_(1.0, 0.1)
    few = torch.randint(256, (1, 32), device=device)
    converted, made = th.surgery.scale_vectors(copy.deepcopy(plain), few)
    folded, unmade = th.surgery.fold(copy.deepcopy(converted), few)
    added = sum(map(torch.numel, converted.parameters())) / sum(map(torch.numel, plain.parameters())) - 1
    print(f"{width} × {depth}: {len(made.moved)} gains became vectors, {added:.2%} more parameters")
    for proof in (made, unmade):
        apart = f"outputs differ by {proof.outputs:.1e}, gradients by {proof.gradients:.1e}"
        print(f"    {proof.operation}: {apart}")
    same = [(name, type(one)) for name, one in plain.named_modules()] == [
        (name, type(one)) for name, one in folded.named_modules()
    ]
    print(f"    folded has the modules of the plain network: {'yes' if same else 'NO'}")
    return {"plain": plain, "converted": converted, "folded": folded}


def training(model: nn.Module, batch: Tensor) -> Callable[[], Any]:
    """One step: forward, backward, AdamW."""
    compiled = torch.compile(model.train(), fullgraph=True, mode=MODE)
    fused = {"fused": True} if batch.is_cuda else {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, **fused)

    def step() -> None:
        torch.compiler.cudagraph_mark_step_begin()
        with autocast(batch):
            logits = compiled(batch)
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def inference(model: nn.Module, batch: Tensor) -> Callable[[], Any]:
    """One pass: forward alone."""
    compiled = torch.compile(model.eval(), fullgraph=True, mode=MODE)

    def forward() -> None:
        torch.compiler.cudagraph_mark_step_begin()
        with torch.no_grad(), autocast(batch):
            compiled(batch)

    return forward


def autocast(batch: Tensor) -> contextlib.AbstractContextManager[Any]:
    return torch.autocast("cuda", torch.bfloat16) if batch.is_cuda else contextlib.nullcontext()


def turns(works: dict[str, Callable[[], Any]], device: str) -> dict[str, float]:
    """Median milliseconds of each, of the CPU's own time there; every round begins with another."""
    clock = time.perf_counter if device == "cuda" else time.process_time
    taken: dict[str, list[float]] = {name: [] for name in works}
    order = list(works)
    for _ in range(ROUNDS[device] + 2):
        for name in order:
            wait(device)
            start = clock()
            for _ in range(EACH[device]):
                works[name]()
            wait(device)
            taken[name].append(1e3 * (clock() - start) / EACH[device])
        order = order[1:] + order[:1]
    return {name: statistics.median(each[2:]) for name, each in taken.items()}


def extra(work: Callable[[], Any]) -> float:
    """MiB at the peak, above what was there before."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    torch.cuda.synchronize()
    return float(torch.cuda.max_memory_allocated() - before) / 2**20


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def compare(width: int, depth: int, device: str) -> None:
    """Time one size, training and inference."""
    models = contenders(width, depth, device)
    batch = torch.randint(256, BATCH[device], device=device)
    kinds: dict[str, Callable[[nn.Module, Tensor], Callable[[], Any]]] = {
        "step": training,
        "pass": inference,
    }
    for kind, prepare in kinds.items():
        torch.compiler.reset()  # networks of one class share a limited number of compiled programs
        works = {name: prepare(model, batch) for name, model in models.items()}
        start = time.perf_counter()
        for work in works.values():
            work()
        seconds = time.perf_counter() - start
        found = turns(works, device)
        said = [f"plain {found['plain']:.2f} ms"]
        for name, wanted in TARGETS.items():
            ratio = found[name] / found["plain"]
            verdict = (
                f" (wanted {wanted:.2f}×: {'yes' if ratio <= wanted else 'NO'})" if device == "cuda" else ""
            )
            said.append(f"{name} {found[name]:.2f} ms, {ratio:.3f}×{verdict}")
        print(f"    a {kind}: {'; '.join(said)}; compiled in {seconds:.0f} s", flush=True)
        if device == "cuda":
            memory = ", ".join(f"{name} {extra(work):.0f} MiB" for name, work in works.items())
            print(f"        at its peak above what it began with: {memory}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument(
        "--mode",
        default="default",
        choices=("default", "reduce-overhead"),
        help="Of torch.compile; reduce-overhead plays CUDA graphs, which launch no kernels one by one.",
    )
    parser.add_argument("--width", type=int, help="The size of this width alone.")
    given = parser.parse_args()
    MODE = given.mode
    torch.set_num_threads(1)
    for size in [each for each in SIZES[given.device] if given.width in (None, each[0])]:
        compare(*size, given.device)
