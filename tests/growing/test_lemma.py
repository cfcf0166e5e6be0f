"""Lipschitz constants from both sides, against the singular values of explicit Jacobians in float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.functional import jacobian

import theodolite as th
from theodolite.growing.lemma import LemmaLayer, cut_in_layers, measure

WIDTH, TOKENS, EXAMPLES = 8, 3, 2


class Block(nn.Module):
    """x + f(x) and a readout, so that a part stands alone in a branch."""

    def __init__(self, branch: nn.Module, post: nn.Module | None = None, width: int = WIDTH) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.branch = branch
        self.post = post or nn.Identity()
        self.last = nn.Linear(width, width)
        self.readout = nn.Linear(width, 5, bias=False)

    def stream(self, x: Tensor) -> Tensor:
        return self.first(x)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stream(x)
        x = self.post(x + self.branch(x))
        return self.readout(self.post(x + self.last(x)))


def layers_of(model: nn.Module, inputs: Tensor) -> tuple[tuple[LemmaLayer, ...], float]:
    examples = [inputs[example : example + 1] for example in range(len(inputs))]
    model = model.double().eval()
    layers, top = measure(cut_in_layers(model, examples[0]), examples)
    assert top.measured <= top.bound * (1 + 1e-9)
    return layers, top.measured


def steepest(function: Callable[[Tensor], Tensor], inputs: Tensor) -> float:
    """The largest singular value of its Jacobian at any example."""
    found = []
    for example in inputs.split(1):
        matrix = jacobian(function, example).reshape(-1, example.numel())
        found.append(float(torch.linalg.svdvals(matrix).max()))
    return max(found)


def inputs() -> Tensor:
    return torch.randn(EXAMPLES, TOKENS, WIDTH).double()


class WrittenGelu(nn.Module):
    """As GPT-2 has it."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


class Cube(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x**3


BRANCHES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "relu": lambda: nn.Sequential(nn.Linear(WIDTH, 12), nn.ReLU(), nn.Linear(12, WIDTH)),
    "rms": lambda: nn.Sequential(
        nn.RMSNorm(WIDTH, eps=1e-5), nn.Linear(WIDTH, 12), nn.GELU(), nn.Linear(12, WIDTH)
    ),
    "layer": lambda: nn.Sequential(
        nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 12), nn.SiLU(), nn.Linear(12, WIDTH), nn.Tanh()
    ),
    "written": lambda: nn.Sequential(nn.Linear(WIDTH, 12), WrittenGelu(), nn.Linear(12, WIDTH)),
    "cube": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Cube()),
    "group": lambda: nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.GroupNorm(1, TOKENS), nn.Sigmoid(), nn.Linear(WIDTH, WIDTH)
    ),
}


@pytest.mark.parametrize("name", BRANCHES)
def test_a_branch(name: str) -> None:
    branch = BRANCHES[name]()
    model, x = Block(branch), inputs()
    layers, _ = layers_of(model, x)
    stream = model.stream(x).detach()
    truth = steepest(model.branch, stream)
    assert layers[0].input.measured == pytest.approx(truth, rel=0.01)
    assert truth * (1 - 1e-6) <= layers[0].input.bound < 8 * truth
    assert layers[0].how == "bound"
    far = (branch(stream[:1]) - branch(stream[1:])).norm() / (stream[0] - stream[1]).norm()
    assert float(far.detach()) <= layers[0].input.bound


def test_a_linear_branch_is_bounded_by_its_spectral_norm() -> None:
    model = Block(nn.Sequential(nn.Linear(WIDTH, 12), nn.ReLU(), nn.Linear(12, WIDTH)))
    layers, _ = layers_of(model, inputs())
    product = math.prod(float(torch.linalg.matrix_norm(model.branch[at].weight.detach(), 2)) for at in (0, 2))
    assert layers[0].input.bound == pytest.approx(product, rel=1e-3)
    assert layers[0].input.bound >= product * (1 - 1e-6)


class Twice(nn.Module):
    """Reads what it made twice."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.first = way, nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(2 * WIDTH if way == "cat" else WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if self.way == "cat":
            return self.last(torch.cat([h, h], -1))
        return self.last(h + h if self.way == "add" else torch.add(h, h, alpha=3))


@pytest.mark.parametrize(("way", "factor"), [("add", 2.0), ("alpha", 4.0), ("cat", math.sqrt(2))])
def test_a_value_that_is_read_twice_counts_twice(way: str, factor: float) -> None:
    branch, x = Twice(way), inputs()
    branch.first.weight.data = torch.eye(WIDTH)
    branch.last.weight.data = torch.cat([torch.eye(WIDTH)] * (2 if way == "cat" else 1), 1)
    model = Block(branch)
    layers, _ = layers_of(model, x)
    norm = float(torch.linalg.matrix_norm(branch.last.weight.detach(), 2))
    assert layers[0].input.bound == pytest.approx(factor * norm, rel=1e-3)
    assert layers[0].input.bound >= steepest(branch, model.stream(x).detach()) * (1 - 1e-6)


def test_windows_whose_edges_weigh_more_have_no_bound() -> None:
    x = inputs()
    for counted, how in ((True, "bound"), (False, "measured: no bound for avg_pool")):
        pool = nn.AvgPool1d(3, stride=1, padding=1, count_include_pad=counted)
        model = Block(nn.Sequential(nn.Linear(WIDTH, WIDTH), pool))
        model.branch[0].weight.data = torch.eye(WIDTH)
        layers, _ = layers_of(model, x)
        truth = steepest(model.branch, model.stream(x).detach())
        assert (truth > 1) == (not counted)
        assert layers[0].how.startswith(how)
        assert layers[0].input.value >= truth * (1 - 1e-2)


def test_a_branch_that_is_added_first_and_with_a_factor() -> None:
    class Turned(Block):
        def forward(self, x: Tensor) -> Tensor:
            x = self.stream(x)
            x = torch.add(self.branch(x), x)
            return self.readout(torch.add(x, self.last(x), alpha=0.5))

    model = Turned(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)))
    layers, _ = layers_of(model, inputs())
    assert [one.shortcut.value for one in layers] == [1.0, 1.0]
    assert [one.shortcut.measured for one in layers] == [1.0, 1.0]
    half = 0.5 * float(torch.linalg.matrix_norm(model.last.weight.detach(), 2))
    assert layers[1].input.measured == pytest.approx(half, rel=0.01)
    assert layers[1].input.bound == pytest.approx(half, rel=0.01)


def spread(values: Tensor) -> Tensor:
    """Inputs of very different sizes."""
    return values * torch.tensor([0.05, 1.0])[:, None, None]


@pytest.mark.parametrize("kind", ["rms", "layer", "written out"])
def test_a_norm_of_the_stream(kind: str) -> None:
    class Written(nn.RMSNorm):
        def forward(self, x: Tensor) -> Tensor:
            return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3))

    norm = nn.LayerNorm(WIDTH, eps=1e-3) if kind == "layer" else nn.RMSNorm(WIDTH, eps=1e-3)
    norm = Written(WIDTH) if kind == "written out" else norm
    nn.init.uniform_(norm.weight, -2, 2)
    model, x = Block(nn.Linear(WIDTH, WIDTH, bias=False), norm), spread(inputs())
    nn.init.zeros_(model.first.bias)
    layers, _ = layers_of(model, x)
    found = layers[0].norm
    u = (model.stream(x) + model.branch(model.stream(x))).detach()
    centred = u - u.mean(-1, keepdim=True) if kind == "layer" else u
    least, gain = float(centred.norm(dim=-1).min()), float(norm.weight.detach().abs().max())
    assert found.measured == pytest.approx(steepest(norm, u), rel=0.01)
    assert found.bound == pytest.approx(gain / math.sqrt(least**2 / WIDTH + 1e-3))
    assert found.bound <= gain * math.sqrt(WIDTH) / least
    assert found.bound_anywhere == pytest.approx(gain / math.sqrt(1e-3))
    assert found.measured <= found.bound <= found.bound_anywhere


def test_a_batch_norm_in_eval_mode() -> None:
    norm = nn.BatchNorm1d(WIDTH, eps=1e-3)
    for tensor in (norm.weight.data, norm.running_var):
        tensor.uniform_(0.1, 3)
    model = Block(nn.Sequential(norm, nn.ReLU(), nn.Linear(WIDTH, WIDTH, bias=False)))
    nn.init.eye_(model.branch[2].weight)
    layers, _ = layers_of(model, 50 + torch.randn(EXAMPLES, WIDTH).double())
    expected = float((norm.weight.detach() / (norm.running_var + 1e-3).sqrt()).max())
    assert layers[0].input.bound == pytest.approx(expected, rel=1e-4)
    assert layers[0].input.bound_anywhere == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(("groups", "dilation"), [(1, 1), (2, 2)])
def test_a_convolution(groups: int, dilation: int) -> None:
    class Pictures(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Conv2d(3, 4, 1)
            self.branch = nn.Conv2d(4, 4, 3, padding=dilation, dilation=dilation, groups=groups, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            return (x + self.branch(torch.relu(x))).mean((2, 3))

    model, x = Pictures(), torch.randn(1, 3, 5, 5).double()
    layers, _ = layers_of(model, x)
    truth = steepest(lambda h: model.branch(torch.relu(h)), model.stem(x).detach())
    assert layers[0].input.measured == pytest.approx(truth, rel=0.01)
    assert truth <= layers[0].input.bound < 10 * truth


def test_the_projections_of_a_resnet() -> None:
    model = th.models.ResNet(4, 1)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_var.uniform_(0.5, 2)
    layers, _ = layers_of(model, torch.randn(1, 3, 8, 8).double())
    assert [one.shortcut.value == 1 for one in layers] == [True, False, False]
    assert [one.norm.value for one in layers] == pytest.approx([1, 1, 1])  # the ReLU behind a sum
    for one in layers:
        assert 0 < one.shortcut.measured <= one.shortcut.bound < 10 * one.shortcut.measured
        assert 0 < one.input.measured <= one.input.bound


@pytest.mark.parametrize(
    "options", [{}, {"gated": True, "norm_placement": "post"}, {"norm_placement": "peri"}]
)
def test_a_transformer(options: dict[str, object]) -> None:
    model = th.models.GPT(8, 2, vocab=11, head_dim=4, positions="learned", **options).double()
    tokens = torch.randint(11, (1, 4))
    layers, top = layers_of(model, tokens)
    last = {}
    for name in ("attention", "feed_forward"):
        part = getattr(model.blocks[1], name)

        def keep(module: nn.Module, args: tuple[Tensor, ...], output: Tensor, name: str = name) -> None:
            last[name] = args[0].detach(), output.detach()

        part.register_forward_hook(keep)
    model(tokens)
    for name, found in zip(("attention", "feed_forward"), layers[2:], strict=True):
        part = getattr(model.blocks[1], name)
        rest = (None,) if name == "attention" else ()
        stream = last[name][0]

        def branch(
            h: Tensor, part: th.models.transformer.Residual = part, rest: tuple[None, ...] = rest
        ) -> Tensor:
            return part.norm_out(part.branch(part.norm_in(h), *rest))

        assert found.input.measured == pytest.approx(steepest(branch, stream), rel=0.01)
        assert found.input.measured <= found.input.bound
        weights = {key: one.detach() for key, one in part.named_parameters() if "norm_stream" not in key}
        flat = torch.cat([one.flatten() for one in weights.values()])

        def of_weights(
            flat: Tensor,
            part: th.models.transformer.Residual = part,
            weights: dict[str, Tensor] = weights,
            stream: Tensor = stream,
            rest: tuple[None, ...] = rest,
        ) -> Tensor:
            pieces = flat.split([one.numel() for one in weights.values()])
            own = {key: piece.view_as(weights[key]) for key, piece in zip(weights, pieces, strict=True)}
            # A norm of the sum is no part of the branch.
            branch = nn.ModuleDict({key: getattr(part, key) for key in ("norm_in", "branch", "norm_out")})

            def run(h: Tensor) -> Tensor:
                return branch["norm_out"](branch["branch"](branch["norm_in"](h), *rest))

            branch.forward = run
            return torch.func.functional_call(branch, own, (stream,))

        truth = float(torch.linalg.svdvals(jacobian(of_weights, flat).reshape(stream.numel(), -1)).max())
        assert found.parameter == pytest.approx(truth, rel=0.01)
        assert found.radius == pytest.approx(float(flat.norm()))
        assert found.parameters == flat.numel()
    assert top == pytest.approx(
        steepest(lambda h: model.readout(model.norm(h)), last["feed_forward"][1]), rel=0.01
    )
