"""Plans that were edited badly: one value of plan.json is changed, taken away or put elsewhere."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import theodolite as th
from theodolite import UseError

from .attack import Attack

NUMBERS = [
    -1,
    0,
    -0.0,
    1,
    2.5,
    -1e-3,
    1e-320,
    1e30,
    1e38,
    1e300,
    -1e300,
    10**400,
    math.nan,
    math.inf,
    -math.inf,
]
OTHERS: list[Any] = [
    None,
    True,
    "",
    "nan",
    "1",
    [],
    {},
    [1],
    {"a": 1},
    [[0, 1]],
    "\ud800",
    "hidden",
    "normal",
]


class Tied(nn.Module):
    """With a readout that shares the table's weight, which has a multiplier."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(7, width), nn.Linear(width, 7, bias=False)
        self.head.weight = self.embed.weight
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        nn.init.trunc_normal_(self.layers[0].weight, std=0.1, a=-0.2, b=0.2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x).tanh()
        found: torch.Tensor = self.head(x)
        return found


def _mutations(count: int, folder: Path) -> Iterator[str | None]:
    tokens = torch.zeros(1, 4, dtype=torch.long)
    sizes = {"size": th.Size(12, 1), "base": th.Size(8, 1)}
    paths = [
        th.plan(Tied, tokens, optimizer=rule, lr=0.1, weight_decay=0.1, **sizes).save(folder / f"{rule}.json")
        for rule in ("adamw", "muon")
    ]
    whole = [path.read_text(encoding="utf-8") for path in paths]
    for number in range(count):
        draw = random.Random(number)
        content = json.loads(draw.choice(whole))
        said = _mutate(content, draw)
        changed = folder / "changed.json"
        changed.write_text(json.dumps(content), encoding="utf-8")
        fault = _fault(changed)
        yield fault and f"{said}: {fault}"


def _mutate(content: dict[str, Any], draw: random.Random) -> str:
    """Change one value somewhere inside; what was done, in words."""
    places = [place for place in _places(content) if "reasons" not in place[2]]
    numbers = [place for place in places if isinstance(place[0][place[1]], int | float)]
    holder, key, where = draw.choice(numbers if draw.random() < 0.7 else places)
    kind = draw.randrange(10)
    if kind == 0:
        del holder[key]
        return f"{where} is taken away"
    if kind == 1 and isinstance(holder, dict):
        holder[f"{key}s"] = holder.pop(key)
        return f"{where} is renamed"
    if kind == 2:
        other, its_key, _ = draw.choice(places)
        value = json.loads(json.dumps(other[its_key]))
    else:
        value = draw.choice(NUMBERS if kind < 8 else OTHERS)
    holder[key] = value
    return f"{where} is {str(value)[:40]}"


def _places(inside: Any, where: str = "plan") -> Iterator[tuple[Any, Any, str]]:
    """Every place of a JSON value: what holds it, its key there, and the way to it."""
    if not isinstance(inside, dict | list):
        return
    for key in list(inside) if isinstance(inside, dict) else range(len(inside)):
        yield inside, key, f"{where}.{key}"
        yield from _places(inside[key], f"{where}.{key}")


def _fault(path: Path) -> str | None:
    try:
        plan = th.Plan.load(path, Tied)
    except UseError as error:
        return None if "\n" not in str(error) else f"the error has several lines: {error}"
    except Exception as error:
        return f"load: {type(error).__name__}: {error}"
    try:
        model = plan.build()
        optimizer = plan.optimizer(model)
    except UseError:
        return None  # of another network, or with options that its optimizer does not have
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    for name, tensor in model.named_parameters():
        if not bool(tensor.isfinite().all()):
            return f"{name} is not finite"
    for group in optimizer.param_groups:
        for option in ("lr", "weight_decay"):
            if not (math.isfinite(group[option]) and group[option] >= 0):
                return f"{option} of {group['param_names'][0]} is {group[option]}"
    return None


ATTACKS = [
    Attack(
        "one value of a plan.json is changed",
        "refused in one line, or weights, learning rates and decays are finite",
        _mutations,
        few=60,
        many=1500,
    )
]
