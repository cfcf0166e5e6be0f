"""Second derivatives: products, projections, eigenvalues and densities, in CPU time and against peers.

    python benchmarks/curvature.py                         ours, on one thread
    .venv-peers/bin/python benchmarks/curvature.py         beside PyHessian and curvlinops (`make peers`)
    python benchmarks/curvature.py --device cuda           a GPU: the projection against products of H

LeNet-300-100 on 128 images and a GPT of width 128 and 4 blocks on 8 × 128 bytes, in float32. Contenders take
turns, and medians are compared. A gradient is what training would compute, with the attention it would use.
Everything is counted for a projection, eigenvalues and a density: making the operator and its graph too.
PyHessian's density calls `torch.eig`, which is gone: it gets `torch.linalg.eigh` in its place.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator, eigsh
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import theodolite as th
from theodolite import probes
from theodolite.core.batches import Batch
from theodolite.probes.curvature.directions import draw
from theodolite.workloads import next_token_loss

DIRECTIONS, TOP, TOLERANCE, STEPS = 50, 5, 1e-5, 100
PEERS = {
    name for name in ("pyhessian", "curvlinops", "hessian_eigenthings") if importlib.util.find_spec(name)
}
TARGETS = {
    ("LeNet", "product"): 1.3,
    ("GPT", "product"): 2.5,
    ("LeNet", "projection", "PyHessian"): 5,
    ("LeNet", "projection", "curvlinops"): 10,
    ("GPT", "projection", "PyHessian"): 1,
    ("GPT", "projection", "curvlinops"): 1,
    ("LeNet", "eigenvalues", "PyHessian"): 10,
    ("GPT", "eigenvalues", "PyHessian"): 10,
    ("LeNet", "density", "PyHessian"): 1.2,
    ("GPT", "density", "PyHessian"): 1.2,
    ("LeNet", "projection", "loop"): 9,
}


@dataclass(frozen=True)
class Task:
    """A network with its loss and its batch."""

    name: str
    model: nn.Module
    loss: Callable[[Tensor, Tensor], Tensor]
    batch: Batch

    def to(self, device: str, dtype: torch.dtype = torch.float32) -> Task:
        """The same elsewhere; the model is moved, not copied."""
        inputs, targets = self.batch
        inputs = inputs.to(device, dtype if inputs.is_floating_point() else None)
        return Task(self.name, self.model.to(device, dtype), self.loss, (inputs, targets.to(device)))

    def gradient(self) -> tuple[Tensor, ...]:
        """One forward and one backward pass."""
        value = self.loss(self.model(self.batch[0]), self.batch[1])
        return torch.autograd.grad(value, list(self.model.parameters()))

    def operator(self) -> Any:
        """Ours."""
        return probes.hessian(self.model, self.loss, self.batch)


def lenet() -> Task:
    torch.manual_seed(0)
    model = th.models.LeNet300()
    try:
        batch = th.data.draw_examples(th.data.fashion_mnist(), num=128, seed=0, step=0)
    except th.UseError as error:
        print(f"random images: {error}")
        batch = torch.randn(128, 1, 28, 28), torch.arange(128) % 10
    return Task("LeNet", model, nn.functional.cross_entropy, batch)


def gpt() -> Task:
    torch.manual_seed(0)
    model = th.models.GPT(128, 4, vocab=256, context=128)
    batch = th.data.draw_text(th.data.state_of_the_union(), num=8, length=128, seed=0, step=0)
    return Task("GPT", model, next_token_loss, batch)


@dataclass(frozen=True)
class Turns:
    """The median seconds of each contender, and what each returned last."""

    seconds: dict[str, float]
    found: dict[str, Any]


def turns(contenders: dict[str, Callable[[], Any]], rounds: int, clock: Callable[[], float]) -> Turns:
    """Contenders one after the other in every round; the first is not counted, unless it is the only one."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    found: dict[str, Any] = {}
    for _ in range(rounds + 1 if rounds > 1 else 1):
        for name, work in contenders.items():
            found[name] = None  # before the next is made: two graphs may not fit
            start = clock()
            found[name] = work()
            seconds[name].append(clock() - start)
    return Turns({name: statistics.median(each[-rounds:]) for name, each in seconds.items()}, found)


def peer(task: Task) -> Any:
    """PyHessian's operator, with the graph of the gradient in it."""
    from pyhessian import hessian

    with sdpa_kernel(SDPBackend.MATH), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of .backward(create_graph=True)
        made = hessian(task.model, task.loss, data=task.batch, cuda=False)
    task.model.zero_grad()
    task.model.train()
    return made


def pieces(task: Task, vector: Tensor) -> list[Tensor]:
    parameters = list(task.model.parameters())
    split = vector.split([one.numel() for one in parameters])
    return [piece.view_as(one) for piece, one in zip(split, parameters, strict=True)]


def by_pyhessian(task: Task, matrix: Tensor) -> Tensor:
    from pyhessian import hessian_vector_product

    made = peer(task)
    columns = [
        torch.cat([
            one.flatten() for one in hessian_vector_product(made.gradsH, made.params, pieces(task, column))
        ])
        for column in matrix.mT.contiguous()
    ]  # fmt: skip
    return matrix.mT @ torch.stack(columns, 1)


def by_curvlinops(task: Task, matrix: Tensor, *, block: bool) -> Tensor:
    from curvlinops import HessianLinearOperator

    class Loss(nn.CrossEntropyLoss):  # which it asks for its reduction
        def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
            return task.loss(logits, targets)

    with sdpa_kernel(SDPBackend.MATH):
        operator = HessianLinearOperator(
            task.model,
            Loss(),
            list(task.model.parameters()),
            [task.batch],
            check_deterministic=False,
            num_data=len(task.batch[0]),
        )
        columns = operator @ matrix if block else torch.stack([operator @ one for one in matrix.mT], 1)
    return matrix.mT @ columns


def by_products(task: Task, matrix: Tensor, *, block: bool) -> Tensor:
    operator = task.operator()
    columns = operator @ matrix if block else torch.stack([operator @ one for one in matrix.mT], 1)
    return matrix.mT @ columns


def reference(task: Task) -> np.ndarray:
    """The largest eigenvalues in magnitude by scipy, of float64 products by plain double backward."""
    exact = task.to("cpu", torch.float64)
    parameters = list(exact.model.parameters())
    with sdpa_kernel(SDPBackend.MATH):
        value = exact.loss(exact.model(exact.batch[0]), exact.batch[1])
        slopes = torch.autograd.grad(value, parameters, create_graph=True)

    def product(vector: np.ndarray) -> np.ndarray:
        given = pieces(exact, torch.from_numpy(vector).double().flatten())
        found = torch.autograd.grad(slopes, parameters, given, retain_graph=True)
        return torch.cat([one.flatten() for one in found]).numpy()

    size = sum(one.numel() for one in parameters)
    operator = LinearOperator((size, size), matvec=product, dtype=np.float64)
    start = np.random.default_rng(0).normal(size=size)
    found = eigsh(operator, k=TOP, which="LM", tol=1e-10, v0=start, return_eigenvectors=False)
    task.to("cpu")
    return found[np.argsort(-np.abs(found))]


def modern_eig(matrix: Tensor, eigenvectors: bool) -> tuple[Tensor, Tensor]:
    values, vectors = torch.linalg.eigh(matrix)
    return torch.stack([values, torch.zeros_like(values)], 1), vectors


def told(what: str, ratio: float, target: float | None, *, most: bool = False) -> None:
    reached = target is None or (ratio <= target if most else ratio >= target)
    goal = (
        ""
        if target is None
        else f"  (goal: {'≤' if most else '≥'} {target}, {'reached' if reached else 'NOT REACHED'})"
    )
    print(f"  {what}: {ratio:.2f}{goal}", flush=True)


def product(task: Task, rounds: int) -> None:
    operator = task.operator()
    vector = torch.randn(operator.size)
    gauss_newton, residual = operator.gauss_newton, operator.residual
    contenders: dict[str, Callable[[], Any]] = {
        "gradient": task.gradient,
        "H v": lambda: operator @ vector,
        "G v": lambda: gauss_newton @ vector,
        "S v": lambda: residual @ vector,
    }
    if "pyhessian" in PEERS:
        from pyhessian import hessian_vector_product

        made, given = peer(task), pieces(task, vector)
        contenders["PyHessian"] = lambda: hessian_vector_product(made.gradsH, made.params, given)
    seconds = turns(contenders, 8 * rounds, time.process_time).seconds
    print(f"{task.name}: one product; a gradient takes {1e3 * seconds['gradient']:.1f} ms")
    for name in list(contenders)[1:]:
        goal = TARGETS[task.name, "product"] if name == "H v" else None
        told(f"{name} in gradients", seconds[name] / seconds["gradient"], goal, most=True)


def projection(task: Task, rounds: int) -> None:
    shapes = {name: one.shape for name, one in task.model.named_parameters()}
    matrix = draw(shapes, DIRECTIONS, seed=0).matrix.contiguous()
    given = (task.model, task.loss, task.batch)
    contenders: dict[str, Callable[[], Any]] = {
        "ours": partial(probes.curvature, *given, directions=DIRECTIONS, seed=0),
        "our products": partial(by_products, task, matrix, block=False),
    }
    if "pyhessian" in PEERS:
        contenders["PyHessian"] = partial(by_pyhessian, task, matrix)
    if "curvlinops" in PEERS:
        for block in (True, False):  # whichever suits it
            contenders[f"curvlinops, {'a block' if block else 'one by one'}"] = partial(
                by_curvlinops, task, matrix, block=block
            )
    run = turns(contenders, rounds, time.process_time)
    ours, reading = run.seconds["ours"], run.found["ours"]
    print(f"{task.name}: RᵀHR with {DIRECTIONS} directions, ours in {ours:.3f} s by {reading.route}")
    expected = reading.hessian.matrix
    for name in list(contenders)[1:]:
        apart = float((run.found[name] - expected).norm() / expected.norm())
        goal = TARGETS.get((task.name, "projection", name.split(",")[0]))
        seconds = run.seconds[name]
        told(f"{name} ({seconds:.2f} s, {apart:.0e} from ours) in times ours", seconds / ours, goal)


def eigenvalues(task: Task, rounds: int) -> None:
    truth = reference(task)
    given = {"k": TOP, "which": "magnitude", "rtol": TOLERANCE}
    ours = partial(probes.eigenvalues, task.model, task.loss, task.batch, **given)
    run = turns({"ours": ours}, rounds, time.process_time)
    reading, seconds = run.found["ours"], run.seconds["ours"]
    print(
        f"{task.name}: the {TOP} eigenvalues of largest magnitude, {', '.join(f'{one:.4g}' for one in truth)}"
    )
    near = off(reading.values.numpy(), truth)
    print(f"  ours at {TOLERANCE:g}: {seconds:.2f} s, {near:.0e} off, {reading.status}", flush=True)
    if "pyhessian" not in PEERS:
        return
    # Its tolerance is the change from one iteration to the next, so it takes a smaller one to be as near.
    for tolerance in TOLERANCE * 10.0 ** -np.arange(4):
        torch.manual_seed(0)
        start = time.process_time()
        values = np.array(peer(task).eigenvalues(maxIter=3000, tol=tolerance, top_n=TOP)[0])
        theirs = time.process_time() - start
        print(f"  PyHessian at {tolerance:g}: {theirs:.2f} s, {off(values, truth):.0e} off", flush=True)
        if off(values, truth) <= TOLERANCE or theirs > 20 * seconds:
            break
    goal = TARGETS[task.name, "eigenvalues", "PyHessian"]
    told("PyHessian, where it is as near or the last try, in times ours", theirs / seconds, goal)


def off(values: np.ndarray, truth: np.ndarray) -> float:
    """The largest relative error."""
    values = values[np.argsort(-np.abs(values))]
    return float(np.max(np.abs(values - truth) / np.abs(truth)))


def density(task: Task, rounds: int) -> None:
    contenders: dict[str, Callable[[], Any]] = {
        "ours": lambda: probes.density(task.model, task.loss, task.batch, probes=1, steps=STEPS)
    }
    if "pyhessian" in PEERS:
        torch.eig = modern_eig  # type: ignore[attr-defined]
        contenders["PyHessian"] = lambda: peer(task).density(iter=STEPS, n_v=1)
    seconds = turns(contenders, max(1, rounds // 2), time.process_time).seconds
    print(f"{task.name}: density from one vector and {STEPS} steps, ours in {seconds['ours']:.2f} s")
    if "PyHessian" in seconds:
        told(
            "PyHessian in times ours",
            seconds["PyHessian"] / seconds["ours"],
            TARGETS[task.name, "density", "PyHessian"],
        )


def on_gpu(task: Task, rounds: int) -> None:
    """The projection against a loop of products and against vmapped products, in wall time."""

    def clock() -> float:
        torch.cuda.synchronize()
        return time.perf_counter()

    shapes = {name: one.shape for name, one in task.model.named_parameters()}
    matrix = draw(shapes, DIRECTIONS, seed=0, device="cuda").matrix.contiguous()
    temperatures = [2.0**power for power in range(-12, 13)]
    given = (task.model, task.loss, task.batch)
    contenders: dict[str, Callable[[], Any]] = {
        "ours": partial(probes.curvature, *given, directions=DIRECTIONS),
        "loop": partial(by_products, task, matrix, block=False),
        "vmap": partial(by_products, task, matrix, block=True),
        "25 temperatures": partial(probes.along_temperature, *given, temperatures, directions=DIRECTIONS),
    }
    torch.cuda.reset_peak_memory_stats()
    run = turns(contenders, 3 * rounds, clock)
    seconds, reading = run.seconds, run.found["ours"]
    expected = reading.hessian.matrix.cuda()
    took, peak = 1e3 * seconds["ours"], torch.cuda.max_memory_allocated() / 2**30
    print(f"{task.name}: RᵀHR with {DIRECTIONS} directions, ours in {took:.1f} ms by {reading.route}")
    print(f"  at the peak of all contenders: {peak:.1f} GiB")
    for name in ("loop", "vmap"):
        apart = float((run.found[name].double() - expected).norm() / expected.norm())
        goal = TARGETS.get((task.name, "projection", name))
        told(
            f"{name} ({1e3 * seconds[name]:.1f} ms, {apart:.0e} from ours) in times ours",
            seconds[name] / seconds["ours"],
            goal,
        )
    told("25 temperatures in times one", seconds["25 temperatures"] / seconds["ours"], None)


PARTS = {"product": product, "projection": projection, "eigenvalues": eigenvalues, "density": density}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--parts", default=",".join(PARTS), help="of the CPU's")
    parser.add_argument("--networks", default="LeNet,GPT")
    parser.add_argument("--rounds", type=int, default=5, help="turns that are counted")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    tasks = [make() for name, make in (("LeNet", lenet), ("GPT", gpt)) if name in chosen.networks.split(",")]
    where = torch.cuda.get_device_name() if chosen.device == "cuda" else "one thread of a CPU"
    beside = f", beside {', '.join(sorted(PEERS))}" if PEERS and chosen.device == "cpu" else ""
    print(f"{where}, torch {torch.__version__}{beside}")
    for task in tasks:
        # A round of the GPT takes minutes.
        rounds = chosen.rounds if task.name == "LeNet" else 1
        if chosen.device != "cpu":
            on_gpu(task.to(chosen.device), chosen.rounds)
            continue
        for part in chosen.parts.split(","):
            PARTS[part](task, rounds)


if __name__ == "__main__":
    main()
