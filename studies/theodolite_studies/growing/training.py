"""How the networks of the growing study are trained: a GPT on one device, every step a CUDA graph.

Batches and learning rates are tables on the device, which a step looks up by its number: nothing waits for
the host. Blocks are compiled once for all depths, outside the network: surgery and probes see it as it is.
"""

# B batch, T tokens, D width

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from theodolite import data
from theodolite.core.batches import Batch
from theodolite.core.building import evaluated, untouched_randomness
from theodolite.models import GPT
from theodolite.models.transformer import make_rotation
from theodolite.workloads import next_token_loss
from theodolite_studies.framework.networks import TEXTS
from theodolite_studies.framework.study import Setting

EAGER_STEPS = 3
"""Before a step is captured as a graph; by then optimizers hold all they will hold."""
Order = str | int


@dataclass(frozen=True, kw_only=True)
class GrowingSetting(Setting):
    """A byte-level GPT on a text, trained with AdamW at one learning rate for all."""

    text: str
    """A data set of `theodolite.data`."""
    length: int
    num: int
    """Sequences in a batch."""
    lr: float
    precision: Literal["float32", "bfloat16"]
    warmup: int
    """Steps of linear warmup, at the start and again after a growth: of those that do not grow too."""
    decay: int
    """Steps over which the learning rate falls to zero at the end."""
    held_out: int
    """Sequences of the validation part that a network is judged by."""
    units: int
    """Sequences that the signal is estimated on; it is measured on as many others."""
    certify: int
    """Sequences that a jump is certified on."""

    width: int
    depth: int
    """Of the network that is grown."""
    before: int
    """Steps before it grows, at a constant learning rate."""
    after: int
    """Steps after two blocks were added; who spends less or more on a step makes more or fewer."""
    looks: int
    """Points of each curve."""
    draws: int
    """Of random places, for each seed."""

    ranked_depth: int
    """Of the network whose points are ranked."""
    ranked_before: int
    moments: tuple[int, ...]
    """Steps after an insertion at which what it gained is looked at."""
    orders: int
    """Of the data behind an insertion: how well do the gains of two agree?"""

    grown_width: int
    deepest: int
    """Blocks of the network that is grown from one, block by block."""
    stage: int
    """Steps at each depth, at a constant learning rate."""
    stage_decay: int
    """Steps of a branch at the end of each depth, over which the learning rate falls to zero."""
    coupled: tuple[tuple[int, int], ...]
    """Widths and depths of networks that are trained from scratch: depth grows as width."""
    coupled_steps: int

    repetitions: int
    """Of estimate, choose and certify, in each regime of the coverage part; fewer of misused splits."""


FULL = GrowingSetting(
    text="enwik8",
    length=256,
    num=64,
    lr=2.0**-9,
    precision="bfloat16",
    warmup=50,
    decay=250,
    held_out=512,
    units=256,
    certify=4096,
    width=256,
    depth=6,
    before=1500,
    after=1000,
    looks=20,
    draws=3,
    ranked_depth=12,
    ranked_before=1000,
    moments=(10, 30, 100),
    orders=2,
    grown_width=128,
    deepest=8,
    stage=400,
    stage_decay=100,
    coupled=((64, 2), (128, 4), (192, 6), (256, 8)),
    coupled_steps=1500,
    repetitions=2000,
)
SMALL = GrowingSetting(
    small=True,
    text="sotu",
    length=64,
    num=8,
    lr=2.0**-8,
    precision="float32",
    warmup=5,
    decay=10,
    held_out=32,
    units=16,
    certify=64,
    width=64,
    depth=2,
    before=40,
    after=30,
    looks=4,
    draws=2,
    ranked_depth=3,
    ranked_before=40,
    moments=(5, 15),
    orders=2,
    grown_width=32,
    deepest=3,
    stage=20,
    stage_decay=5,
    coupled=((32, 1), (64, 2), (96, 3)),
    coupled_steps=30,
    repetitions=100,
)
"""For a CPU: the built-in text and short runs, to see how it goes."""

ADDED = 2
"""Blocks that are added; and as many as there are, which doubles the depth."""
SEEDS = (0, 1, 2)
FURTHER_SEEDS = (3, 4)
"""Of the main part, after all else."""


@dataclass(frozen=True)
class Lesson:
    """The text on the device, and which windows of it are seen when."""

    setting: GrowingSetting
    device: str
    train: Tensor
    validation: Tensor

    @staticmethod
    def of(setting: GrowingSetting, device: str) -> Lesson:
        """The setting's text; brought to the device once in a process."""
        return Lesson(setting, device, *(_text(setting.text, split, device) for split in SPLITS))

    def starts(self, order: Order, steps: int, *, split: str = "train", num: int | None = None) -> Tensor:
        """Where the windows of all steps begin, (steps, B): the same for the same order."""
        places = len(getattr(self, split)) - self.setting.length
        generator = data.generator("growing", self.setting.text, split, order)
        drawn = generator.integers(places, size=(steps, num or self.setting.num))
        return torch.from_numpy(drawn).to(self.device)

    def window(self, start_B: Tensor, *, split: str = "train") -> Batch:
        """Bytes (B, T) and the byte after each of them."""
        place_T = torch.arange(self.setting.length + 1, device=start_B.device)
        window_BT = getattr(self, split)[start_B[:, None] + place_T].long()
        return window_BT[:, :-1], window_BT[:, 1:]

    def batches(self, order: Order, count: int, *, split: str = "train") -> list[Batch]:
        """`count` sequences as a list of batches, which no training sees at a step of its own."""
        num = min(self.setting.num, count)
        starts = self.starts(order, -(-count // num), split=split, num=num)
        return [self.window(start_B, split=split) for start_B in starts]


@dataclass
class Pupil:
    """A network and its optimizer."""

    model: GPT
    optimizer: AdamW

    @property
    def depth(self) -> int:
        """Its blocks, as they are now."""
        return len(self.model.blocks)

    def copied(self) -> Pupil:
        """Another of the same values, moments and all."""
        return Pupil(*copy.deepcopy((self.model, self.optimizer)))


def enrolled(setting: GrowingSetting, width: int, depth: int, seed: int, device: str) -> Pupil:
    """A network with the weights of a seed."""
    with untouched_randomness(seed):
        model = GPT(width, depth, context=setting.length).to(device)
    return Pupil(model, optimizer_of(model.parameters(), setting, device))


def optimizer_of(parameters: Any, setting: GrowingSetting, device: str) -> AdamW:
    """AdamW whose learning rate is a tensor: a captured step reads it."""
    on_gpu = torch.device(device).type == "cuda"
    lr = torch.tensor(setting.lr, device=device)
    return AdamW(parameters, lr=lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True, capturable=on_gpu)


def flops_of(setting: GrowingSetting, width: int, depth: int, *, steps: float = 1) -> float:
    """Of some training steps: 6 for each weight and token, attention's products of the causal half too.

    A block has 12·width² weights, the readout 256·width; looking up an embedding costs nothing.
    """
    weights = 12 * depth * width**2 + 256 * width + depth * width * setting.length
    return 6.0 * weights * setting.num * setting.length * steps


def wsd(steps: int, *, warmup: int, decay: int) -> list[float]:
    """Factors of the learning rate: a linear warmup, a plateau, a linear decay that ends at zero.

    >>> wsd(5, warmup=2, decay=2)
    [0.5, 1.0, 1.0, 1.0, 0.5]
    """
    return [min(1.0, (step + 1) / max(warmup, 1), (steps - step) / max(decay, 1)) for step in range(steps)]


class PupilSteps:
    """Some steps of a pupil, from a place in the order of the data on.

    Args:
        pupil: is changed in place; it must not grow while the course goes on.
        lesson: the data.
        order: of the data.
        first: the place in it.
        factors: of the learning rate, one for each step there is.
    """

    def __init__(
        self, pupil: Pupil, lesson: Lesson, *, order: Order, first: int, factors: Sequence[float]
    ) -> None:
        self.pupil, self.lesson = pupil, lesson
        self.device = torch.device(lesson.device)
        self._starts = lesson.starts(order, first + len(factors))[first:]
        rates = [factor * lesson.setting.lr for factor in factors]
        self._rates = torch.tensor(rates, device=self.device)
        self._step = torch.zeros(1, dtype=torch.long, device=self.device)
        self._made = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._call = _compiled_block() if self.device.type == "cuda" else _call_block
        self._trained = [one for group in pupil.optimizer.param_groups for one in group["params"]]

    def go(self, steps: int) -> None:
        """So many steps further."""
        for _ in range(steps):
            if self._graph is not None:
                self._graph.replay()
            elif self.device.type != "cuda":
                self._advance()
            elif self._made < EAGER_STEPS:
                self._on_the_side()
            else:
                self._capture()
            self._made += 1
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _advance(self) -> None:
        """The step itself: nothing in it waits for the device."""
        inputs, targets = self.lesson.window(self._starts.index_select(0, self._step)[0])
        with _precision(self.lesson.setting, self.device):
            loss = next_token_loss(_logits(self.pupil.model, inputs, self._call), targets)
        # Of what is trained alone: the optimizer may hold a part of the network.
        gradients = torch.autograd.grad(loss, self._trained)
        for parameter, gradient in zip(self._trained, gradients, strict=True):
            parameter.grad = gradient
        rate = self._rates.index_select(0, self._step)[0]
        for group in self.pupil.optimizer.param_groups:
            group["lr"].copy_(rate)
        self.pupil.optimizer.step()
        self.pupil.optimizer.zero_grad()
        self._step.add_(1)

    def _on_the_side(self) -> None:
        """On another stream, as capturing asks of what comes before it."""
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            self._advance()
        torch.cuda.current_stream(self.device).wait_stream(side)

    def _capture(self) -> None:
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._advance()
        self._graph = graph
        graph.replay()


@torch.no_grad()
def judged(model: GPT, lesson: Lesson, *, num: int | None = None) -> float:
    """The mean loss over the held-out sequences, the same for all; nan where it has diverged."""
    count = num or lesson.setting.held_out
    total = torch.zeros((), dtype=torch.float64, device=lesson.device)
    batches = lesson.batches("judge", count, split="validation")
    with evaluated(model), _precision(lesson.setting, torch.device(lesson.device)):
        for inputs, targets in batches:
            total += next_token_loss(model(inputs), targets).double()
    return float(total / len(batches))


def rounded(value: float, digits: int = 6) -> float | None:
    """For JSON, which knows no nan."""
    return round(value, digits) if math.isfinite(value) else None


SPLITS = ("train", "validation")


@functools.cache
def _text(name: str, split: Any, device: str) -> Tensor:
    return TEXTS[name](split).tokens.to(device)


def _precision(setting: GrowingSetting, device: torch.device) -> torch.autocast:
    # What autocast keeps would be freed behind a captured graph's back.
    half = setting.precision == "bfloat16"
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=half, cache_enabled=False)


def _logits(model: GPT, tokens_BT: Tensor, call: Callable[..., Tensor]) -> Tensor:
    """What the network returns, by another way to call its blocks."""
    x_BTD = model.embed(tokens_BT)
    rotation = make_rotation(tokens_BT.shape[-1], model.head_dim, like=x_BTD)
    for block in model.blocks:
        x_BTD = call(block, x_BTD, rotation)
    logits: Tensor = model.readout(model.norm(x_BTD))
    return logits


def _call_block(block: nn.Module, x_BTD: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    out_BTD: Tensor = block(x_BTD, rotation)
    return out_BTD


@functools.cache
def _compiled_block() -> Callable[..., Tensor]:
    """One compilation for all blocks of a width."""
    torch._dynamo.config.recompile_limit = 64
    return torch.compile(_call_block, dynamic=False)
