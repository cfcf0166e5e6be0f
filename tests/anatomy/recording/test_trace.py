"""Looking at a network leaves no trace on it, and sees what the network does."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from theodolite.anatomy import AnatomyError, dissect
from theodolite.anatomy.recording.trace import most_quick_parameters, trace
from theodolite.anatomy.recording.undisturbed import undisturbed
from theodolite.core.size import Size


@pytest.fixture(autouse=True, params=["values", "no values"])
def _quick(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network is traced with values if it is small, and without if it is large: the same is seen."""
    if request.param == "no values":
        monkeypatch.setattr("theodolite.anatomy.recording.trace._MOST_REAL_PRODUCTS", 0)


class Everything(nn.Module):
    """What a careless look would disturb: statistics, dropout, noise, mixed modes, hooks, old gradients."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)
        self.drop = nn.Dropout(0.5)
        self.frozen = nn.BatchNorm2d(width)
        self.head = nn.Linear(width, 5)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.values_matter = False
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.drop(self.frozen(F.relu(self.norm(self.embed(x)))))
        x = x + torch.randn_like(x)
        if self.values_matter and float(x.sum()) > 1e9:  # the value, so that nothing but a real run will do
            x = -x
        if self.fails:
            raise ValueError("on purpose")
        return self.head(x.mean((2, 3)))


def _snapshot(model: nn.Module) -> dict[str, Any]:
    return {
        "parameters": {n: (id(p), p.detach().clone(), p.requires_grad) for n, p in model.named_parameters()},
        "gradients": {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()},
        "buffers": {n: (id(b), b.clone()) for n, b in model.named_buffers()},
        "modes": {n: m.training for n, m in model.named_modules()},
        "hooks": {
            n: (len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks))
            for n, m in model.named_modules()
        },
        "attributes": {n: sorted(vars(m)) for n, m in model.named_modules()},
        "torch": torch.random.get_rng_state(),
        "numpy": np.random.get_state()[1].tolist(),
        "python": random.getstate(),
        "fast path": torch.backends.mha.get_fastpath_enabled(),
        "onednn": torch.backends.mkldnn.enabled,
        "sdp": (
            torch.backends.cuda.flash_sdp_enabled(),
            torch.backends.cuda.mem_efficient_sdp_enabled(),
            torch.backends.cuda.math_sdp_enabled(),
        ),
        "grad mode": torch.is_grad_enabled(),
        "threads": torch.get_num_threads(),
        "dtype": torch.get_default_dtype(),
    }


def _same(one: Any, other: Any) -> bool:
    """Equal to the last bit."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


def _used_model() -> Everything:
    """A model in the middle of training: some gradients, statistics of its own, mixed modes."""
    model = Everything()
    model(torch.randn(2, 3, 8, 8)).sum().backward()
    model.embed.weight.grad = None
    model.head.bias.requires_grad_(False)
    model.train()
    model.frozen.eval()
    model.drop.eval()
    return model


@pytest.mark.parametrize("values_matter", [False, True], ids=["fake", "real"])
@pytest.mark.parametrize("fails", [False, True], ids=["runs", "raises"])
def test_a_dissected_module_is_as_it_was(values_matter: bool, fails: bool) -> None:
    model = _used_model()
    model.values_matter, model.fails = values_matter, fails
    torch.manual_seed(3), np.random.seed(4), random.seed(5)
    before = _snapshot(model)
    inputs = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    kept = inputs.clone()
    if fails:
        with pytest.raises(AnatomyError, match="on purpose"):
            dissect(model, inputs)
    else:
        dissect(model, inputs)
    after = _snapshot(model)
    for kind, value in before.items():
        assert _same(after[kind], value), kind
    assert torch.equal(inputs, kept)


def test_building_and_looking_leave_the_random_numbers_alone() -> None:
    torch.manual_seed(3), np.random.seed(4), random.seed(5)
    states = torch.random.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()

    def build(width: int, depth: int) -> nn.Module:
        model = Everything(width)
        model.values_matter = True
        return model

    dissect(build, torch.zeros(2, 3, 8, 8), size=Size(8, 1))
    assert torch.equal(torch.random.get_rng_state(), states[0])
    assert np.random.get_state()[1].tolist() == states[1]
    assert random.getstate() == states[2]


def test_settings_the_caller_changed_stay_changed() -> None:
    torch.backends.mha.set_fastpath_enabled(False)
    torch.backends.cuda.enable_math_sdp(False)
    try:
        with torch.no_grad():
            dissect(Everything(), torch.zeros(2, 3, 8, 8))
            assert not torch.is_grad_enabled()
        assert not torch.backends.mha.get_fastpath_enabled()
        assert not torch.backends.cuda.math_sdp_enabled()
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
        torch.backends.cuda.enable_math_sdp(True)


def test_a_network_too_large_for_any_memory_is_dissected() -> None:
    """Two matrices of 2^44 elements each: 64 TiB apiece, if anything were allocated."""

    def build(width: int, depth: int) -> nn.Module:
        return nn.Sequential(nn.Linear(4, width), *[nn.Linear(width, width) for _ in range(depth)])

    anatomy = dissect(build, torch.zeros(1, 4), size=Size(2**22, 2))
    assert anatomy.num_parameters > 2 * 2**44
    assert [part.role for part in anatomy.values()] == ["input", "bias", "hidden", "bias", "hidden", "bias"]


class Net(nn.Module):
    """An input layer, blocks given by a function of (block, stream), a readout."""

    def __init__(self, width: int, depth: int, step: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.embed = nn.Linear(6, width)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(width, 2 * width), "down": nn.Linear(2 * width, width)})
            for _ in range(depth)
        )
        self.head = nn.Linear(width, 3)
        self.step = step

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = self.step(block, x)
        return self.head(x)


def _f(block: Any, x: Tensor) -> Tensor:
    return block.down(F.relu(block.up(x)))


def _add_in_place(block: Any, x: Tensor) -> Tensor:
    x += _f(block, x)
    return x


def _add_onto_the_branch(block: Any, x: Tensor) -> Tensor:
    return _f(block, x).add_(x)


def _add_to_a_view(block: Any, x: Tensor) -> Tensor:
    view = x.view(-1, x.shape[-1])
    view += _f(block, x).view_as(view)
    return x  # the write shows through


def _add_with_out(block: Any, x: Tensor) -> Tensor:
    return torch.add(x, _f(block, x), out=torch.empty_like(x))


def _add_to_the_later_tokens(block: Any, x: Tensor) -> Tensor:
    x = x.clone()
    x[:, 1:] += _f(block, x[:, 1:])
    return x


def _copy_into_a_fresh_tensor(block: Any, x: Tensor) -> Tensor:
    made = torch.empty_like(x)
    made.copy_(x)
    made += _f(block, x)
    return made


WRITES = [
    _add_in_place,
    _add_onto_the_branch,
    _add_to_a_view,
    _add_with_out,
    _add_to_the_later_tokens,
    _copy_into_a_fresh_tensor,
]


@pytest.mark.parametrize("step", WRITES, ids=lambda step: step.__name__.strip("_"))
def test_additions_in_place_and_through_views_are_seen(step: Callable[[Any, Tensor], Tensor]) -> None:
    anatomy = dissect(lambda w, d: Net(w, d, step), torch.zeros(2, 5, 6), size=Size(16, 3))
    assert [(b.block, b.branch, b.layers) for b in anatomy.branches] == [(0, 0, 2), (1, 0, 2), (2, 0, 2)]
    for number, branch in enumerate(anatomy.branches):
        assert branch.ends == (f"blocks.{number}.down.weight", f"blocks.{number}.down.bias")
        assert len(branch.parts) == 4


def test_control_flow_that_depends_on_values_gets_a_real_run() -> None:
    def step(block: Any, x: Tensor) -> Tensor:
        return x + _f(block, x) if float(x.detach().abs().sum()) >= 0 else x

    anatomy = dissect(lambda w, d: Net(w, d, step), torch.ones(2, 6), size=Size(16, 2))
    assert anatomy.num_blocks == 2
    assert anatomy["blocks.1.down.weight"].ends_branch


def test_tensors_that_are_no_parameters_are_constants() -> None:
    """A mask held as a plain attribute multiplies the branch; it is neither a Part nor a hindrance."""

    class Masked(Net):
        def __init__(self, width: int, depth: int) -> None:
            super().__init__(width, depth, lambda block, x: x + _f(block, x) * self.mask)
            self.mask = torch.ones(width)

    for build in (Masked, Masked(16, 2)):
        inputs = torch.zeros(2, 6)
        anatomy = (
            dissect(build, inputs)
            if isinstance(build, nn.Module)
            else dissect(build, inputs, size=Size(16, 2))
        )
        assert "mask" not in " ".join(anatomy)
        assert anatomy["blocks.0.down.weight"].ends_branch


def test_a_network_in_half_precision_is_dissected() -> None:
    model = Net(16, 2, lambda block, x: x + _f(block, x)).to(torch.bfloat16)
    anatomy = dissect(model, torch.zeros(2, 6, dtype=torch.bfloat16))
    assert anatomy.num_blocks == 2


OUTPUTS: dict[str, Callable[[Tensor], Any]] = {
    "tensor": lambda y: y,
    "dict": lambda y: {"logits": y},
    "logits and loss": lambda y: (y, y.square().mean()),
    "loss and logits in a dict": lambda y: {"loss": y.square().mean(), "logits": y},
    "two heads": lambda y: [y[..., :1], y[..., 1:]],
    "nested": lambda y: {"out": {"first": y, "second": [y * 2]}},
}


@pytest.mark.parametrize("returns", OUTPUTS.values(), ids=OUTPUTS)
def test_what_the_network_returns_does_not_change_what_is_in_it(returns: Callable[[Tensor], Any]) -> None:
    class Returns(Net):
        def forward(self, x: Tensor) -> Any:
            return returns(super().forward(x))

    def build(width: int, depth: int) -> nn.Module:
        return Returns(width, depth, lambda block, x: x + _f(block, F.layer_norm(x, x.shape[-1:])))

    anatomy = dissect(build, torch.zeros(2, 6), size=Size(16, 2))
    assert [(b.placement, b.ends[0]) for b in anatomy.branches] == [
        ("pre", "blocks.0.down.weight"),
        ("pre", "blocks.1.down.weight"),
    ]
    assert anatomy["head.weight"].role == "output"


class Caching(Net):
    """Keeps a mask and registers a buffer at the first call, as causal masks and rotary tables are kept."""

    def __init__(self, width: int = 16, depth: int = 2, real: bool = False) -> None:
        super().__init__(width, depth, lambda block, x: x + _f(block, x))
        self.mask: Tensor | None = None
        self.real = real

    def forward(self, x: Tensor) -> Tensor:
        if self.mask is None:
            self.mask = torch.ones(x.shape[-1])
            self.register_buffer("late", torch.ones(3))
        if self.real and float(x.sum()) < 0:
            return x
        x.mul_(1.5)
        return super().forward(x * self.mask)


@pytest.mark.parametrize("real", [False, True], ids=["fake", "real"])
def test_what_a_forward_pass_keeps_or_writes_is_undone(real: bool) -> None:
    model, inputs = Caching(real=real), torch.ones(2, 6)
    dissect(model, inputs)
    assert model.mask is None
    assert "late" not in dict(model.named_buffers())
    assert torch.equal(inputs, torch.ones(2, 6))
    assert type(model(inputs)) is Tensor


def test_a_build_may_draw_from_any_generator() -> None:
    import random

    import numpy as np

    def build(width: int, depth: int) -> nn.Module:
        random.random(), np.random.rand()
        return Net(width, depth, lambda block, x: x + _f(block, x))

    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    dissect(build, torch.zeros(2, 6), size=Size(16, 2))
    assert random.getstate() == before[0]
    assert np.random.get_state()[1].tolist() == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])


def test_inference_mode_hides_nothing() -> None:
    model = Net(16, 2, lambda block, x: x + _f(block, x))
    with torch.inference_mode():
        anatomy = dissect(model, torch.zeros(2, 6))
    assert [branch.layers for branch in anatomy.branches] == [2, 2]


def _written(stacked: Tensor) -> Tensor:
    stacked[0] = 0
    return stacked.sum(0)


BY_NAME: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "lerp": lambda a, b: torch.lerp(input=a, end=b, weight=0.3),
    "addcmul": lambda a, b: torch.addcmul(a, tensor1=b, tensor2=b, value=2),
    "addmm": lambda a, b: torch.addmm(a, mat1=b, mat2=b, beta=0.5),
    "a bias": lambda a, b: torch.addmm(input=a[0], mat1=b, mat2=b),
    "baddbmm": lambda a, b: a[None].baddbmm(batch1=b[None], batch2=b[None], alpha=0.5),
    "not read": lambda a, b: torch.baddbmm(a[None] * math.nan, b[None], b[None], beta=0, alpha=0.5),
    "a stack that is written to": lambda a, b: _written(torch.stack([a, b])),
    "a stack of masks": lambda a, b: torch.stack([a > 0, b > 0]).sum(0).float(),
    "a stack": lambda a, b: torch.stack([a, b], dim=-1).mean(-1),
}


@pytest.mark.parametrize("way", BY_NAME)
def test_sums_in_disguise_have_the_values_they_have_elsewhere(way: str) -> None:
    a, b = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(0))
    with undisturbed(nn.Identity()):
        found = BY_NAME[way](a.clone(), b.clone())
    torch.testing.assert_close(found, BY_NAME[way](a.clone(), b.clone()))


def test_a_buffer_that_the_forward_pass_writes_to_is_no_constant() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.scale = nn.Buffer(torch.tensor(2.0))

        def forward(self, x: Tensor) -> Tensor:
            x = self.layer(x)
            self.scale.copy_(x.abs().mean() * 0 + 100)
            return x / self.scale.item()

    (node,) = [node for node in trace(Net(), torch.randn(3, 4)).nodes if node.op == "div"]
    assert node.args[1] == pytest.approx(100)


def test_the_size_of_inputs_is_seen_inside_of_any_object() -> None:
    @dataclasses.dataclass
    class Molecule:
        positions: Tensor

    plain = torch.zeros(50, 3)
    assert most_quick_parameters([Molecule(plain)]) == most_quick_parameters(plain)
    assert most_quick_parameters(plain[:25]) >= 2 * most_quick_parameters(plain)
