"""What test_mup_audit.py runs in the peers' environment: audits of networks with microsoft/mup, as JSON.

Its readout, base shapes and optimizers are used as its README says.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import theodolite as th
from theodolite import Size, Workload

BASE, DELTA = 32, 48
"""The width of the base model, and of another, by which mup knows which dimensions are widths."""
HEADS, VOCAB, CONTEXT = 4, 16, 8
LR = 1e-2


class MLP(nn.Module):
    def __init__(self, width: int, depth: int, readout: type[nn.Linear]) -> None:
        super().__init__()
        self.first = nn.Linear(8, width)
        self.hidden = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.readout = readout(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        for layer in self.hidden:
            x = layer(x).relu()
        return self.readout(x)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, width = x.shape
        d = width // HEADS
        heads = (one.view(b, t, HEADS, d).transpose(1, 2) for one in self.qkv(self.norm_1(x)).chunk(3, -1))
        # 8/d instead of 1/√d, as mup says for its transformer.
        y = functional.scaled_dot_product_attention(*heads, is_causal=True, scale=8 / d)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, width))
        return x + self.down(self.up(self.norm_2(x)).relu())


class Transformer(nn.Module):
    def __init__(self, width: int, depth: int, readout: type[nn.Linear], tied: bool) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.readout = readout(self.tokens.weight, bias=False) if tied else readout(width, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.readout(self.norm(x))


def mlp(readout: type[nn.Linear]) -> Workload:
    """An MLP on rows of numbers."""

    def build(width: int, depth: int) -> nn.Module:
        return with_shapes(lambda size: MLP(size, depth, readout), width)

    def batch(seed: int, step: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1_000_003 * seed + step)
        inputs = torch.randn(32, 8, generator=generator)
        return inputs, (inputs[:, 0] * inputs[:, 1] > 0).long() + 2 * (inputs[:, 2] > 0).long()

    return Workload("mup's MLP", build, batch, functional.cross_entropy, Size(BASE, 2))


def transformer(readout: type[nn.Linear], *, tied: bool = False, initialised: bool = False) -> Workload:
    """A Transformer, on tokens of which the next follows from the last two.

    If `initialised`, the table gets initial values that do not depend on the width, after mup's own.
    """

    def build(width: int, depth: int) -> nn.Module:
        made: Any = with_shapes(lambda size: Transformer(size, depth, readout, tied), width)
        if initialised:
            from mup import normal_

            normal_(made.tokens.weight)
        return made

    def batch(seed: int, step: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1_000_003 * seed + step)
        tokens = torch.randint(VOCAB, (8, CONTEXT + 1), generator=generator)
        for at in range(2, CONTEXT + 1):
            tokens[:, at] = (tokens[:, at - 1] + 3 * tokens[:, at - 2] + 1) % VOCAB
        return tokens[:, :-1], tokens[:, 1:]

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    return Workload("mup's Transformer", build, batch, loss, Size(BASE, 2))


def with_shapes(build: Callable[[int], nn.Module], width: int) -> nn.Module:
    from mup import MuReadout, set_base_shapes

    model = build(width)
    plain = not any(isinstance(module, MuReadout) for module in model.modules())
    # mup refuses a readout that is not its own, unless told otherwise.
    return set_base_shapes(model, build(BASE), delta=build(DELTA), do_assert=not plain)


def networks() -> dict[str, Workload]:
    from mup import MuReadout, MuSharedReadout

    return {
        "MLP": mlp(MuReadout),
        "MLP, readout of torch": mlp(nn.Linear),
        "Transformer": transformer(MuReadout),
        "Transformer, readout of torch": transformer(nn.Linear),
        "tied": transformer(MuSharedReadout, tied=True, initialised=True),
        "tied, as it is built": transformer(MuSharedReadout, tied=True),
    }


def optimizers() -> dict[str, Callable[[nn.Module], Any]]:
    from mup import MuAdam, MuAdamW, MuSGD

    return {
        "MuAdamW": lambda model: MuAdamW(model.parameters(), lr=LR, weight_decay=0.1),
        "MuAdam": lambda model: MuAdam(model.parameters(), lr=LR),
        "MuSGD": lambda model: MuSGD(model.parameters(), lr=LR),
        "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1),
        "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=LR),
    }


def audited(workload: Workload, make: Callable[[nn.Module], Any], train: bool) -> dict[str, Any]:
    found = th.audit(workload, optimizer=make, widths=[32, 64, 128], depths=[2], train=train)
    findings = [finding.to_dict() for finding in found.findings if finding.level != "ok"]
    return {"right": found.right, "trained": found.trained, "findings": findings}


def factors(workload: Workload) -> dict[str, tuple[float, float]]:
    """The numbers that tensors are multiplied by at four times the base width, where they are not 1."""
    anatomy = th.dissect(workload.build, workload.batch(0, 0)[0], size=Size(4 * BASE, 2))
    numbers = {part.name: (part.factor, part.readout_factor) for part in anatomy.values()}
    return {name: pair for name, pair in numbers.items() if pair != (1, 1)}


def main() -> None:
    torch.set_num_threads(1)
    audits = {
        f"{network} | {name}": audited(workload, make, train=name == "MuAdamW")
        for network, workload in networks().items()
        for name, make in optimizers().items()
    }
    numbers = {network: factors(workload) for network, workload in networks().items()}
    print(json.dumps({"audits": audits, "factors": numbers}))


if __name__ == "__main__":
    main()
