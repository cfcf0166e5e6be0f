"""What cannot be measured is refused by every probe, in a sentence that names the culprit."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from theodolite import UseError, probes

from .every import EVERY

# What cannot be measured during training is a value in its row: see its own tests.
NAMES = [name for name in EVERY if name != "track"]
every = pytest.mark.parametrize("name", NAMES)
# A landscape is made of losses alone: it shows infinite ones, and needs no second derivative.
derivatives = pytest.mark.parametrize("name", [name for name in NAMES if name != "landscape"])


def network():
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def batch():
    return torch.randn(6, 4).double(), torch.arange(6) % 3


@derivatives
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite(name, value):
    with pytest.raises(UseError, match=rf"the loss is {value}\b.*weights"):
        EVERY[name](network(), lambda logits, targets: F.cross_entropy(logits, targets) + value, batch())


@derivatives
def test_weights_that_are_not_finite(name):
    model = network()
    model[0].weight.data[0, 0] = math.nan
    with pytest.raises(UseError, match="the loss is nan"):
        EVERY[name](model, F.cross_entropy, batch())


class Rooted(nn.Module):
    """Its loss is finite. |0·x|^½ has the derivative 0·inf at 0, |0·x|^1.5 such a second one."""

    def __init__(self, power):
        super().__init__()
        self.first, self.last, self.power = nn.Linear(4, 5), nn.Linear(5, 3), power

    def forward(self, inputs):
        hidden = self.first(inputs).tanh()
        return self.last(hidden + (0 * hidden).abs().pow(self.power))


PRODUCTS = ("hessian", "gauss_newton", "residual", "gradient")
"""Tensors, in which nan can be seen."""


@pytest.mark.parametrize("name", [name for name in NAMES if name not in (*PRODUCTS, "landscape")])
@pytest.mark.parametrize("power", [0.5, 1.5])
def test_derivatives_that_are_not_finite(name, power):
    """2 of 4 tensors are before the power; of the Hessian those behind it are spoilt as well."""
    with pytest.raises(UseError, match=r"not finite,? in \d of 4 tensors \(first\.weight"):
        EVERY[name](Rooted(power).double(), F.cross_entropy, batch())


@every
def test_a_loss_that_is_not_a_scalar(name):
    with pytest.raises(UseError, match=r"tensor of shape \(6,\).*mean"):
        EVERY[name](
            network(), lambda logits, targets: F.cross_entropy(logits, targets, reduction="none"), batch()
        )


@every
def test_a_loss_that_is_a_number(name):
    with pytest.raises(UseError, match="float"):
        EVERY[name](network(), lambda logits, targets: F.cross_entropy(logits, targets).item(), batch())


class Unused(nn.Module):
    """One of its parameters has no part in the output."""

    def __init__(self):
        super().__init__()
        self.used, self.idle = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, inputs):
        return self.used(inputs)


@derivatives
def test_a_loss_that_does_not_depend_on_a_parameter(name):
    with pytest.raises(UseError, match=r"does not depend on idle\.weight.*parameters="):
        EVERY[name](Unused().double(), F.cross_entropy, batch())


def test_a_parameter_that_the_loss_does_not_depend_on_can_be_left_out():
    found = probes.hessian(Unused().double(), F.cross_entropy, batch(), parameters=["used.*"])
    assert found.names == ("used.weight", "used.bias")


@derivatives
def test_a_loss_that_depends_on_no_parameter(name):
    class Detached(nn.Module):
        def forward(self, logits):
            return logits.detach()

    with pytest.raises(UseError, match=r"does not depend on 0\.0\.weight"):
        EVERY[name](nn.Sequential(network(), Detached()), F.cross_entropy, batch())


@derivatives
def test_a_loss_that_ignores_the_logits(name):
    """Its derivative is missing, not zero: something in it was detached by mistake."""
    with pytest.raises(UseError, match="does not depend on"):
        EVERY[name](network(), lambda logits, targets: logits.detach().square().mean(), batch())


@every
def test_integer_parameters(name):
    model = network()
    model.table = nn.Parameter(torch.arange(3), requires_grad=False)
    EVERY[name](model, F.cross_entropy, batch())  # they are left out by themselves
    with pytest.raises(UseError, match=r"table is torch.int64"):
        probes.hessian(model, F.cross_entropy, batch(), parameters=["*"])


@every
def test_no_parameters_at_all(name):
    with pytest.raises(UseError, match="no parameters"):
        EVERY[name](nn.Tanh(), F.cross_entropy, (torch.randn(6, 3), torch.arange(6) % 3))


@every
def test_all_parameters_frozen(name):
    with pytest.raises(UseError, match=r"none of the 4 parameters requires a gradient.*parameters="):
        EVERY[name](network().requires_grad_(False), F.cross_entropy, batch())


SELECTING = ("hessian", "curvature", "eigenvalues", "outliers", "sharpness", "trace", "density", "landscape")


@pytest.mark.parametrize("name", SELECTING)
def test_an_empty_selection(name):
    with pytest.raises(UseError, match="parameters"):
        getattr(probes, name)(network(), F.cross_entropy, batch(), parameters=[])
    with pytest.raises(UseError, match=r"'2\.wieght'.*'2\.weight'"):
        getattr(probes, name)(network(), F.cross_entropy, batch(), parameters=["2.wieght"])


@pytest.mark.parametrize("k", [0, -1, 44, 1.5, True])
def test_a_number_of_eigenvalues_that_there_are_not(k):
    # 43 parameters
    with pytest.raises(UseError, match=rf"k is {k}\b"):
        probes.eigenvalues(network(), F.cross_entropy, batch(), k=k)


@pytest.mark.parametrize("directions", [0, 1, 44, -3])
def test_a_number_of_directions_that_there_are_not(directions):
    with pytest.raises(UseError, match=rf"directions is {directions}\b.*43"):
        probes.curvature(network(), F.cross_entropy, batch(), directions=directions)


@pytest.mark.parametrize("temperature", [0, -1, math.nan, math.inf, "hot"])
@pytest.mark.parametrize("name", [name for name in SELECTING if name != "landscape"])
def test_a_temperature_that_is_none(name, temperature):
    with pytest.raises(UseError, match=f"temperature is {temperature!r}"):
        getattr(probes, name)(network(), F.cross_entropy, batch(), temperature=temperature)


class Cubed(torch.autograd.Function):
    """Differentiable once, and says so."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * grad


class Kernel(torch.autograd.Function):
    """The same with a kernel in its backward that autograd cannot look into, as fused ones have."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return torch.from_numpy(3 * x.detach().numpy() ** 2 * grad.detach().numpy())


class Own(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function.apply(x)


@derivatives
@pytest.mark.parametrize("function", [Cubed, Kernel])
def test_a_model_without_a_second_derivative(name, function):
    """Autograd would leave out, without a word, what depends on it."""
    if name in ("gauss_newton", "gradient", "curvature", "along_temperature", "along_scale"):
        pytest.skip("needs its first derivative only; tangents have their own second ones")
    model = nn.Sequential(nn.Linear(4, 5), Own(function), nn.Linear(5, 3)).double()
    with pytest.raises(UseError, match=rf"{function.__name__}.*second derivative"):
        EVERY[name](model, F.cross_entropy, batch())


class Fused(nn.Module):
    """The fused attention of a CPU, asked for by name, which has no second derivative."""

    def __init__(self):
        super().__init__()
        self.mixed = nn.Linear(4, 12)

    def forward(self, inputs):
        query, key, value = self.mixed(inputs).unflatten(-1, (3, 1, 1, 4)).permute(1, 2, 3, 0, 4)
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value)[0][0, 0]


@derivatives
def test_an_operation_without_a_second_derivative(name):
    if name in ("gradient",):
        pytest.skip("needs the first derivative only")
    with pytest.raises(UseError, match=r"flash_attention\w* has no second derivative"):
        EVERY[name](Fused().double(), F.cross_entropy, batch())


class Bags(nn.Module):
    """An embedding bag has no second derivative either, and autograd words it in another way."""

    def forward(self, logits):
        # Weighted, so that it is not linear: the residual of a linear one needs no second derivative.
        bags = torch.arange(len(logits))[:, None]
        return F.embedding_bag(bags, logits, per_sample_weights=logits[:, :1], mode="sum")


@derivatives
def test_another_operation_without_a_second_derivative(name):
    if name == "gradient":
        pytest.skip("needs the first derivative only")
    with pytest.raises(UseError, match=r"embedding_bag\w* has no second derivative"):
        EVERY[name](nn.Sequential(network(), Bags()), F.cross_entropy, batch())


@every
@pytest.mark.parametrize(
    ("given", "said"),
    [
        (iter([]), "more than once"),
        ([], "empty"),
        ([torch.ones(2), torch.ones(2), torch.ones(2)], "pairs"),
        (7, "7|int"),
        (None, "None|a loss and a batch"),
    ],
)
def test_a_batch_that_is_none(name, given, said):
    with pytest.raises(UseError, match=said):
        EVERY[name](network(), F.cross_entropy, given)


@every
def test_something_that_is_no_model(name):
    with pytest.raises(UseError, match=r"function|Module"):
        EVERY[name](lambda inputs: inputs, F.cross_entropy, batch())


@every
def test_a_vector_of_another_length(name):
    if name not in ("hessian", "gauss_newton", "residual"):
        pytest.skip("takes no vector")
    operator = probes.hessian(network(), F.cross_entropy, batch())
    operator = operator if name == "hessian" else getattr(operator, name)
    for wrong in (torch.ones(42), torch.ones(44, 2), torch.ones(43, 2, 2), torch.tensor(1.0)):
        with pytest.raises(UseError, match="43"):
            operator @ wrong
    with pytest.raises(UseError, match=r"2\.bias"):
        operator @ {name: torch.ones(shape) for name, shape in operator.shapes.items() if name != "2.bias"}
    with pytest.raises(UseError, match=r"more"):
        operator @ (
            {name: torch.ones(shape) for name, shape in operator.shapes.items()} | {"more": torch.ones(1)}
        )
    with pytest.raises(UseError, match=r"0\.weight has the shape \(4, 5\)"):
        operator @ (
            {name: torch.ones(shape) for name, shape in operator.shapes.items()}
            | {"0.weight": torch.ones(4, 5)}
        )
