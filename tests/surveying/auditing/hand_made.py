"""A small GPT with a hand-written parameterization, its optimizer, and the mistakes that people make in one.

The recipe is CompleteP for AdamW, Table 1 of arXiv 2505.01618, and the same condition for SGD and for Muon
(Table 1 of the paper on width–depth muP, with the multipliers in the forward pass). With `depth=False` it is
muP in width alone. Everything else is as in nanoGPT: learned positions, pre-norm blocks, an MLP four times as
wide. Nothing here uses the package that is tested.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import LambdaLR

VOCAB, CONTEXT, HEAD_DIM, HEADS = 32, 8, 8, 4
BASE_WIDTH, BASE_DEPTH = 32, 2
LR, DECAY, STD = 1e-2, 0.1, 0.1
ENDS = ("proj.weight", "down.weight")
"""Weights that end a branch."""


@dataclass(frozen=True)
class Recipe:
    """One parameterization: what is right, and which mistakes were made."""

    optimizer: str = "adamw"
    """`adamw`, `sgd`, `muon` (torch's scale by default) or `muon-rms` (0.2·√max(in, out))."""
    norm: str = "rms"
    fused: bool = True
    """Are queries, keys and values one tensor?"""
    bias: bool = False
    tied: bool = False
    growing_heads: bool = False
    """Do heads grow in size instead of in number?"""
    multiply: str = "before"
    """Where the readout is multiplied: `before`, `after`, or `in place` as in nanoGPT-mup."""
    absorbed: bool = False
    """Are the multipliers of readout and branches in initial values and options instead of the forward pass,
    as in Table 3 of arXiv 2203.03466?"""
    depth: bool = True
    """False: muP in width alone."""
    eps: float = 1e-12
    one_eps: bool = False
    """One eps for all tensors, `eps/(m_N·m_L)`, as in nanoGPT-mup."""
    faults: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        assert self.faults <= FAULTS, self.faults - FAULTS

    def has(self, fault: str) -> bool:
        assert fault in FAULTS, fault
        return fault in self.faults


FAULTS = frozenset(
    {
        # in the network
        "readout not multiplied",
        "readout multiplied twice",
        "attention by the root",
        "constant std",
        "branch not multiplied",
        "depth in init and branch",
        "tied std as hidden",
        # in the optimizer
        "hidden lr not divided",
        "embedding lr divided",
        "readout lr divided",
        "decay times lr twice",
        "decay left alone",
        "eps left alone",
        "tied as hidden",
        # in the factory
        "head left out",
        "head twice",
        "positions frozen",
        "scheduler",
        "state",
    }
)


def recipe(*faults: str, **options: Any) -> Recipe:
    return Recipe(faults=frozenset(faults), **options)


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


def make_norm(width: int, made: Recipe) -> nn.Module:
    return RMSNorm(width) if made.norm == "rms" else nn.LayerNorm(width, bias=made.bias)


class Attention(nn.Module):
    def __init__(self, width: int, made: Recipe) -> None:
        super().__init__()
        self.heads = HEADS if made.growing_heads else width // HEAD_DIM
        self.dim = width // self.heads
        self.scale = math.sqrt(HEAD_DIM) / self.dim  # 1/√d at base size, and as 1/d from there
        if made.has("attention by the root"):
            self.scale = 1 / math.sqrt(self.dim)
        if made.fused:
            self.qkv = nn.Linear(width, 3 * width, bias=made.bias)
        else:
            self.q, self.k, self.v = (nn.Linear(width, width, bias=made.bias) for _ in range(3))
        self.proj = nn.Linear(width, width, bias=made.bias)
        self.fused = made.fused

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        projected = self.qkv(x).split(d, dim=2) if self.fused else (self.q(x), self.k(x), self.v(x))
        q, k, v = (one.view(b, t, self.heads, self.dim).transpose(1, 2) for one in projected)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        return self.proj(y.transpose(1, 2).reshape(b, t, d))


class MLP(nn.Module):
    def __init__(self, width: int, made: Recipe) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=made.bias)
        self.down = nn.Linear(4 * width, width, bias=made.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, width: int, branch_scale: float, made: Recipe) -> None:
        super().__init__()
        self.ln_1, self.attn = make_norm(width, made), Attention(width, made)
        self.ln_2, self.mlp = make_norm(width, made), MLP(width, made)
        self.branch_scale = branch_scale

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.branch_scale * self.attn(self.ln_1(x))
        return x + self.branch_scale * self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, width: int, depth: int, made: Recipe) -> None:
        super().__init__()
        self.m_width = width / BASE_WIDTH
        self.m_depth = depth / BASE_DEPTH if made.depth else 1.0
        self.made = made
        branch_scale = 1.0 if made.absorbed or made.has("branch not multiplied") else 1 / self.m_depth
        self.wte, self.wpe = nn.Embedding(VOCAB, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width, branch_scale, made) for _ in range(depth))
        self.ln_f = make_norm(width, made)
        self.head = nn.Linear(width, VOCAB, bias=False)
        if made.tied:
            self.head.weight = self.wte.weight
        self._start()
        if made.has("positions frozen"):
            self.wpe.weight.requires_grad_(False)

    def _start(self) -> None:
        hidden = STD if self.made.has("constant std") else STD / math.sqrt(self.m_width)
        for name, tensor in self.named_parameters():
            if tensor.ndim == 1:
                nn.init.constant_(tensor, float(not name.endswith("bias")))
                continue
            std = hidden if name.startswith("blocks") else STD
            if self.made.has("tied std as hidden") and name == "wte.weight":
                std = hidden
            if self.made.has("depth in init and branch") and name.endswith(ENDS):
                std /= math.sqrt(2 * len(self.blocks))
            nn.init.normal_(tensor, std=std * absorbed_multiplier(self, name))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        x = self.ln_f(x)
        number = 1 / self.m_width
        if self.made.absorbed or self.made.has("readout not multiplied"):
            number = 1.0
        if self.made.has("readout multiplied twice"):
            number = number**2
        if self.made.multiply == "after":
            return self.head(x) * number
        if self.made.multiply == "in place":
            x *= number
            return self.head(x)
        return self.head(number * x)


def building(made: Recipe) -> Callable[[int, int], nn.Module]:
    """`build(width, depth)`."""

    def build(width: int, depth: int) -> nn.Module:
        return GPT(width, depth, made)

    return build


def kind_of(name: str) -> str:
    """`embedding`, `hidden`, `readout`, `vector` (in a block) or `last vector` (the final norm's)."""
    if name.startswith("blocks"):
        return "hidden" if name.endswith(("qkv.weight", "q.weight", "k.weight", "v.weight")) or (
            name.endswith(("proj.weight", "up.weight", "down.weight"))
        ) else "vector"  # fmt: skip
    if name.startswith("ln_f"):
        return "last vector"
    return "readout" if name.startswith("head") else "embedding"


def absorbed_multiplier(model: Any, name: str) -> float:
    """The multiplier of a tensor that is not in the forward pass."""
    if not model.made.absorbed:
        return 1.0
    if name.startswith("head"):
        return 1 / model.m_width
    return 1 / model.m_depth if name.endswith((*ENDS, "proj.bias", "down.bias")) else 1.0


def make_groups(model: Any) -> list[dict[str, Any]]:
    """A group for each tensor, so that a fault in one cannot hide in the options of others."""
    made: Recipe = model.made
    m_n, m_l = model.m_width, model.m_depth
    groups = []
    for name, tensor in model.named_parameters():
        kind = kind_of(name)
        lr, decay, eps = _hypers(kind, m_n, m_l, made)
        if made.has("tied as hidden") and name == "wte.weight":
            lr, decay, eps = _hypers("hidden", m_n, m_l, made)
        if made.has("head left out") and name == "head.weight":
            continue
        alpha = absorbed_multiplier(model, name)
        power = 2 if made.optimizer == "sgd" else 1
        lr, decay, eps = lr * alpha**power, decay / alpha**power, eps / alpha
        group = {"params": [tensor], "lr": lr, "weight_decay": decay}
        groups.append(group if "sgd" in made.optimizer else group | {"eps": eps})
    return groups


def _hypers(kind: str, m_n: float, m_l: float, made: Recipe) -> tuple[float, float, float]:
    """lr, decay and eps, which go with one forward multiplier 1/m_L on branches and 1/m_N on the readout."""
    if made.optimizer == "sgd":
        by = {"embedding": m_n, "hidden": m_l, "readout": m_n, "vector": m_n * m_l, "last vector": m_n}
        return LR * by[kind], DECAY / by[kind], 0.0
    in_block = kind in ("hidden", "vector")
    hidden = kind == "hidden"
    eps = made.eps / (m_n * m_l if in_block or made.one_eps else m_n)
    lr, decay = (LR / m_n, DECAY * m_n) if hidden else (LR, DECAY)
    if made.has("hidden lr not divided") and hidden:
        lr, decay = LR, DECAY
    if made.has("embedding lr divided") and kind == "embedding":
        lr, decay = LR / m_n, DECAY * m_n
    if made.has("readout lr divided") and kind == "readout":
        lr, decay = LR / m_n, DECAY * m_n
    if made.has("decay left alone") and hidden:
        decay = DECAY
    if made.has("decay times lr twice") and hidden:
        decay = DECAY / m_n
    if made.has("eps left alone"):
        eps = made.eps
    return lr, decay if kind not in ("vector", "last vector") else 0.0, eps


class TwoOptimizers(list[Optimizer]):
    """Several optimizers, as a list."""


calls = 0
"""How often a factory with state was called."""


def make_optimizer(model: Any) -> Any:
    """The optimizer of the recipe that the model was built with; what the factory returns may be a fault."""
    made: Recipe = model.made
    groups = make_groups(model)
    if made.has("state"):
        global calls
        calls += 1
        for group in groups:
            group["lr"] *= calls
    if made.optimizer == "sgd":
        optimizer: Optimizer = SGD(groups, lr=LR, momentum=0.9)
    elif made.optimizer.startswith("muon"):
        return _muon_and_adamw(model, groups)
    else:
        optimizer = AdamW(groups, lr=LR, betas=(0.9, 0.95))
    if made.has("head twice"):
        return [optimizer, SGD([model.head.weight], lr=LR)]
    if made.has("scheduler"):
        return optimizer, LambdaLR(optimizer, lambda step: min(1.0, step / 10))  # zero at the first step
    return optimizer


def _muon_and_adamw(model: Any, groups: list[dict[str, Any]]) -> list[Optimizer]:
    """Hidden matrices to Muon, whose rates follow from its scale; all others to AdamW."""
    made: Recipe = model.made
    hidden = {id(tensor) for name, tensor in model.named_parameters() if kind_of(name) == "hidden"}
    others = [group for group in groups if id(group["params"][0]) not in hidden]
    matrices = [tensor for tensor in model.parameters() if id(tensor) in hidden]
    assert not made.absorbed, "one group for all"
    rms = made.optimizer == "muon-rms"
    by = math.sqrt(model.m_width) if rms and not made.has("hidden lr not divided") else 1.0
    muon = Muon(
        matrices,
        lr=LR / by,
        weight_decay=DECAY * by,
        adjust_lr_fn="match_rms_adamw" if rms else "original",
    )
    return TwoOptimizers([muon, AdamW(others, lr=LR, betas=(0.9, 0.95))])


def needs_config(model: nn.Module, config: dict[str, Any]) -> Optimizer:
    """A factory that cannot be called with the model alone."""
    return AdamW(model.parameters(), lr=config["lr"])


def batch(seed: int, step: int) -> tuple[Tensor, Tensor]:
    """Tokens, of which the next follows from the last two."""
    generator = torch.Generator().manual_seed(1_000_003 * seed + step)
    tokens = torch.randint(VOCAB, (8, CONTEXT + 1), generator=generator)
    for at in range(2, CONTEXT + 1):
        tokens[:, at] = (tokens[:, at - 1] + 3 * tokens[:, at - 2] + 1) % VOCAB
    return tokens[:, :-1], tokens[:, 1:]


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
