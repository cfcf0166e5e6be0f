"""Classifiers that are trained until they fit their data, and neural collapse after each of their blocks."""

# N images, S side, H half of the side

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from theodolite import data
from theodolite.core.building import build_model
from theodolite.core.calling import Build
from theodolite.core.size import Size
from theodolite.data.batches import Examples
from theodolite.models import ResidualMLP, ResNet
from theodolite.probes import collapse
from theodolite.probes.features.collapse import Collapse
from theodolite_studies.framework.records import Record, short

NUM, BATCH = 2048, 128
"""Examples that are trained on, so few that the networks fit them, and examples of a step."""
DECAY, MORE, MOMENTUM = 5e-4, 10.0, 0.9
"""Decay λ of all weights, `λ/2·‖w‖²`, and how much more of it the arms have in a part of the network."""
USUAL, FEATURES, HEAD, PENALTY = "usual", "features ×10", "head ×10", "penalty"
ARMS = (USUAL, FEATURES, HEAD, PENALTY)
"""The last has the usual decay, and the loss has 10λ/2·‖h‖², mean over examples, of what the head reads."""


@dataclass(frozen=True)
class Task:
    """What is trained, on what, for how long."""

    build: Build
    size: Size
    examples: Callable[[bool], Examples]
    """`NUM` of them: held out, or for training."""
    loss: Callable[[Tensor, Tensor], Tensor]
    lr: float
    steps: int
    clip: float = math.inf
    """Largest norm of the gradient."""


def squares(logits: Tensor, labels: Tensor) -> Tensor:
    """Half the squared distance from the one-hot targets, mean over examples; the loss of the model.

    >>> squares(torch.tensor([[1.0, 1.0]]), torch.tensor([0]))
    tensor(0.5000)
    """
    return 0.5 * (logits - nn.functional.one_hot(labels, logits.shape[1])).square().sum(1).mean()


def plain_mlp(width: int, depth: int, *, inputs: int, outputs: int = 10) -> nn.Sequential:
    """`depth` linear maps with biases, each with a ReLU, and a head; weights are `N(0, 2/fan_in)`."""
    layers: list[nn.Module] = []
    for before in (inputs, *[width] * (depth - 1)):
        linear = nn.Linear(before, width)
        nn.init.kaiming_normal_(linear.weight, nonlinearity="relu")
        nn.init.zeros_(linear.bias)
        layers += [linear, nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, outputs))


def _mixture(held_out: bool) -> Examples:
    return data.mixture(NUM, seed=int(held_out))


def _fashion(held_out: bool) -> Examples:
    """The first of Fashion-MNIST, as 14 × 14 pixels: means over 2 × 2."""
    whole = data.fashion_mnist("test" if held_out else "train")
    images_N1SS = whole.inputs(torch.arange(NUM))
    images_N1HH = nn.functional.avg_pool2d(images_N1SS, 2)
    return Examples("fashion-mnist 14", images_N1HH, whole.labels[:NUM], whole.classes)


CLIP = 1.0
"""Of networks without norms: without it, some of them diverge in their first steps."""
_CE = nn.functional.cross_entropy
_MLP, _RESNET = Size(64, 6), Size(8, 2)
TASKS: Mapping[str, Task] = {
    "MLP, mixture": Task(partial(ResidualMLP, inputs=32), _MLP, _mixture, _CE, 0.05, 4000, CLIP),
    "MLP, fashion": Task(partial(ResidualMLP, inputs=196), _MLP, _fashion, _CE, 0.02, 4000, CLIP),
    "plain MLP, mixture, squares": Task(
        partial(plain_mlp, inputs=32), _MLP, _mixture, squares, 0.05, 4000, CLIP
    ),
    "ResNet, fashion": Task(partial(ResNet, channels=1), _RESNET, _fashion, _CE, 0.1, 500),
}


def train(task: Task, arm: str, seed: int) -> tuple[nn.Module, Collapse]:
    """SGD with momentum, and a learning rate that falls linearly to zero; also the collapse at the start."""
    model = build_model(task.build, task.size, seed=seed)
    examples = task.examples(False)
    start = measure(model, task, examples)
    head = model.get_submodule(start.head.removesuffix(".weight"))
    of_head = set(head.parameters())
    groups = [
        {
            "params": [one for one in model.parameters() if (one in of_head) == is_head],
            "weight_decay": DECAY * (MORE if arm == scaled else 1.0),
        }
        for is_head, scaled in ((False, FEATURES), (True, HEAD))
    ]
    optimizer = torch.optim.SGD(groups, lr=task.lr, momentum=MOMENTUM)
    falling = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, task.steps)
    read: list[Tensor] = []
    hook = head.register_forward_pre_hook(lambda _, given: read.append(given[0]))
    model.train()
    for step in range(task.steps):
        inputs, labels = data.draw_examples(examples, num=BATCH, seed=seed, step=step)
        optimizer.zero_grad()
        loss = task.loss(model(inputs), labels)
        features = read.pop()
        if arm == PENALTY:
            loss = loss + MORE * DECAY / 2 * features.square().sum(1).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), task.clip)
        optimizer.step()
        falling.step()
    hook.remove()
    return model, start


def measure(model: nn.Module, task: Task, examples: Examples) -> Collapse:
    """Neural collapse on all examples, with batch norms that use their running statistics."""
    rows = torch.arange(len(examples.labels)).split(512)
    return collapse(
        model.eval(), task.loss, [(examples.inputs(some), examples.labels[some]) for some in rows]
    )


def networks(task: Task, arm: str, seed: int) -> Iterator[Record]:
    """Train one network; collapse before, after, and after on examples that were held out."""
    model, start = train(task, arm, seed)
    found = {"start": start, "end": measure(model, task, task.examples(False))}
    found["held out"] = measure(model, task, task.examples(True))
    yield {f"{name} {when}": value for when, seen in found.items() for name, value in _kept(seen).items()}


def _kept(seen: Collapse) -> dict[str, Any]:
    blocks = [place for place in seen.places if place.block is not None] or seen.places
    geometries = [place.geometry for place in blocks]
    return {
        "profile": [short(each.quotient) for each in geometries],
        "pinv": [short(each.pinv) for each in geometries],
        "nc2": short(seen.places[-1].geometry.nc2),
        "nc3": short(seen.nc3),
        "nc4": short(seen.nc4),
        "accuracy": short(seen.accuracy),
        "loss": short(seen.loss),
    }
