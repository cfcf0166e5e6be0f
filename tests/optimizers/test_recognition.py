"""The rule of an optimizer that somebody else made, held against how large its steps are."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from theodolite.optimizers import OPTIMIZERS, Planned
from theodolite.optimizers.recognition import (
    BY_NAME,
    ENTRIES_OF_ONE,
    GRADIENTS,
    SIGNS,
    eps_of,
    rule_of,
    rule_of_vectors,
)

LR = 2.0**-10
STEPS = 10
"""RAdam's first five steps have no second moment."""
WITHOUT_RULE = ("Adadelta", "Adafactor", "LBFGS", "Rprop")
"""Classes of torch whose steps are of another size than any rule's: by what they learnt, or by the weight."""


def classes_of_torch() -> list[str]:
    found = {name for name, kind in vars(torch.optim).items() if isinstance(kind, type)}
    return sorted(name for name in found if issubclass(getattr(torch.optim, name), Optimizer))


def step_of(kind: Any, *, times: float, shape: tuple[int, int] = (16, 64), **options: Any) -> Tensor:
    """The last of some steps with one gradient, over the learning rate."""
    weight = nn.Parameter(torch.zeros(shape))
    grad = times * torch.randn(shape, generator=torch.Generator().manual_seed(0))
    optimizer = kind([{"params": [weight], **options.pop("group", {})}], lr=LR, **options)
    before = weight.detach().clone()
    for _ in range(STEPS):
        before = weight.detach().clone()
        weight.grad = grad.clone()
        optimizer.step()
    return (before - weight.detach()) / LR


def own_class(name: str) -> Any:
    if hasattr(torch.optim, name):
        return getattr(torch.optim, name)
    return getattr(pytest.importorskip("pytorch_optimizer"), name)


NAMES = sorted({*ENTRIES_OF_ONE, *GRADIENTS, *SIGNS} - {"SparseAdam"})


def test_every_class_of_torch_is_known_or_known_to_have_no_rule() -> None:
    weights = [nn.Parameter(torch.ones(4, 4))]
    for name in classes_of_torch():
        if name == "Optimizer":
            continue
        made = getattr(torch.optim, name)(weights)
        assert (rule_of(made, made.param_groups[0]) is None) == (name in WITHOUT_RULE), name


@pytest.mark.parametrize("name", NAMES)
def test_steps_go_with_the_gradient_as_the_rule_says(name: str) -> None:
    kind = own_class(name)
    made = kind([nn.Parameter(torch.ones(4, 4))], lr=LR)
    rule = rule_of(made, made.param_groups[0])
    assert rule is not None
    small, large = (step_of(kind, times=times) for times in (1.0, 64.0))
    assert large.norm() / small.norm() == pytest.approx(64.0 ** OPTIMIZERS[rule].degree, rel=0.02), rule
    if rule == "sgd":
        # Momentum that is off by default, or averages of one gradient: a few times the gradient.
        grad = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
        assert 0.05 < (small.norm() / grad.norm()).item() < 20
    else:
        assert 0.03 < small.square().mean().sqrt() < 5  # RAdam's steps still grow


MUONS = [
    (torch.optim.Muon, {}, "muon-original"),
    (torch.optim.Muon, {"adjust_lr_fn": "original"}, "muon-original"),
    (torch.optim.Muon, {"adjust_lr_fn": "match_rms_adamw"}, "muon-kimi"),
    *(
        (OPTIMIZERS[name].implementation, dict(OPTIMIZERS[name].fixed), name)
        for name in ("muon", "muon-original", "muon-kimi", "muon-spectral")
    ),
    ("Muon", {"group": {"use_muon": True}}, "muon-original"),
    ("Muon", {"group": {"use_muon": True}, "use_adjusted_lr": True}, "muon-kimi"),
    ("AdaMuon", {"group": {"use_muon": True}, "use_adjusted_lr": False}, "muon-original"),
    ("AdaMuon", {"group": {"use_muon": True}, "use_adjusted_lr": True}, "muon-kimi"),
    ("NorMuon", {"group": {"use_muon": True}, "use_adjusted_lr": True}, "muon-kimi"),
    ("NorMuon", {"group": {"use_muon": True}, "update_scale": "match_rms"}, "muon-kimi"),
]
FACTORS = {
    "muon": lambda out, fan_in: 1.0,
    "muon-original": lambda out, fan_in: math.sqrt(max(1.0, out / fan_in)),
    "muon-kimi": lambda out, fan_in: 0.2 * math.sqrt(max(out, fan_in)),
    "muon-spectral": lambda out, fan_in: math.sqrt(out / fan_in),
}
"""By rule, the spectral norm of a step over the learning rate, as papers and documentations have it."""


@pytest.mark.parametrize(("kind", "options", "rule"), MUONS)
def test_the_factor_of_a_shape_is_that_of_the_rule(kind: Any, options: dict[str, Any], rule: str) -> None:
    if isinstance(kind, str):
        kind = getattr(pytest.importorskip("pytorch_optimizer"), kind)
    others = {name: value for name, value in options.items() if name != "group"}
    params = [{"params": [nn.Parameter(torch.ones(4, 4))], **options.get("group", {})}]
    made = kind(params, lr=LR, **others)
    assert rule_of(made, made.param_groups[0]) == rule
    decayless = {} if "group" in options else {"weight_decay": 0.0}
    for shape in ((64, 16), (32, 32), (16, 64)):
        step = step_of(kind, times=1.0, shape=shape, **options, **decayless)
        # The five iterations leave singular values between 0.7 and 1.2; normalised rows spread them.
        assert 0.6 < torch.linalg.matrix_norm(step) / FACTORS[rule](*shape) / math.sqrt(min(shape)) < 1.25


def test_vectors_in_the_same_object_have_the_rule_of_adamw() -> None:
    source = pytest.importorskip("pytorch_optimizer")
    weight, bias = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4))
    made = source.Muon([{"params": [weight], "use_muon": True}, {"params": [bias], "use_muon": False}])
    assert [rule_of(made, group) for group in made.param_groups] == ["muon-original", "adamw"]


def with_groups(name: str, module: str = "somebody", **group: Any) -> tuple[Optimizer, dict[str, Any]]:
    """An optimizer of a class that is not installed, with the options that its groups have."""
    kind = type(name, (Optimizer,), {"__module__": module})
    made = kind([{"params": [nn.Parameter(torch.ones(4, 4))], **group}], {})
    return made, made.param_groups[0]


@pytest.mark.parametrize(
    ("name", "group", "rule"),
    [
        ("Muon", {"algorithm": "muon", "adjust_lr": "spectral_norm"}, "muon-spectral"),  # dion
        ("Muon", {"algorithm": "muon", "adjust_lr": "rms_norm"}, "muon-kimi"),
        ("Muon", {"algorithm": "muon", "adjust_lr": None}, "muon"),
        ("Muon", {"algorithm": "adamw", "adjust_lr": "rms_norm"}, "adamw"),
        ("Muon", {"algorithm": "lion"}, "lion"),
        ("NorMuon", {"algorithm": "normuon", "adjust_lr": "rms_norm"}, "muon-kimi"),
        ("Muon", {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.0}, "muon-original"),  # Jordan's
        ("MuonWithAuxAdam", {"use_muon": True, "lr": 0.02}, "muon-original"),
        ("MuonWithAuxAdam", {"use_muon": False, "lr": 0.02}, "adamw"),
        ("Muon", {"wd": 0.1, "adamw_betas": (0.9, 0.95)}, None),  # Moonlight's: the state of a tensor says it
        ("AdamW8bit", {}, "adamw"),
        ("PagedAdamW32bit", {}, "adamw"),
        ("FusedAdam", {}, "adamw"),
        ("DeepSpeedCPUAdam", {}, "adamw"),
        ("FusedLamb", {}, None),
        ("DistributedShampoo", {}, None),  # grafted to the steps of another optimizer
        ("Shampoo", {}, None),
        ("Adafactor", {"scale_parameter": True}, None),
        ("Adafactor", {"scale_parameter": False}, "adamw"),
        ("Mystery", {"lr": 0.1}, None),
    ],
)
def test_classes_that_are_not_installed(name: str, group: dict[str, Any], rule: str | None) -> None:
    assert rule_of(*with_groups(name, **group)) == rule


def test_a_subclass_has_the_rule_of_its_base() -> None:
    class Mine(torch.optim.AdamW):
        pass

    made = Mine([nn.Parameter(torch.ones(2))])
    assert rule_of(made, made.param_groups[0]) == "adamw"


@pytest.mark.parametrize("rule", [name for name in OPTIMIZERS if name not in ("muonh", "adamh")])
def test_classes_of_this_library_are_their_records(rule: str) -> None:
    spec = OPTIMIZERS[rule]
    if spec.source == "pytorch_optimizer":
        pytest.importorskip("pytorch_optimizer")
    weight = nn.Parameter(torch.ones(4, 4))
    group = {"params": [weight], "param_names": ["w"], "rule": rule, "lr": LR, "planned_lr": LR, **spec.fixed}
    made = Planned([group], {rule: spec.maker({})})
    assert rule_of(made, made.param_groups[0]) == rule


@pytest.mark.parametrize("rule", ["muonh", "adamh"])
def test_hyperball_optimizers_are_their_records(rule: str) -> None:
    made = OPTIMIZERS[rule].maker({})([{"params": [nn.Parameter(torch.ones(4, 4))]}])
    assert rule_of(made, made.param_groups[0]) == rule


def test_original_classes_of_pytorch_optimizer_have_the_records_of_the_fixed_ones() -> None:
    source = pytest.importorskip("pytorch_optimizer")
    for rule, spec in OPTIMIZERS.items():
        if spec.source == "pytorch_optimizer":
            made = getattr(source, spec.class_name)([nn.Parameter(torch.ones(4, 4))], lr=LR)
            assert rule_of(made, made.param_groups[0]) == rule


def test_vectors_of_soap_are_stepped_as_by_adamw() -> None:
    source = pytest.importorskip("pytorch_optimizer")
    steps = {}
    for n in (16, 256):
        vector = nn.Parameter(torch.zeros(n))
        made = source.SOAP([vector], lr=LR, weight_decay=0.0)
        (group,) = made.param_groups
        assert rule_of_vectors(rule_of(made, group), group) == "adamw"
        generator = torch.Generator().manual_seed(0)
        for _ in range(3):  # the first finds the bases
            before = vector.detach().clone()
            vector.grad = torch.ones(n) + 0.1 * torch.randn(n, generator=generator)
            made.step()
        steps[n] = (vector.detach() - before).norm().item() / LR
    assert steps[256] / steps[16] == pytest.approx(4, rel=0.2)  # √256/√16: entries of about one
    assert rule_of_vectors("soap", {"precondition_1d": True}) == "soap"
    assert rule_of_vectors("shampoo", {}) == "shampoo"


def test_wrappers_are_looked_through_unless_they_change_the_step() -> None:
    source = pytest.importorskip("pytorch_optimizer")
    inner = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    made = source.Lookahead(inner)
    assert rule_of(made, made.param_groups[0]) == "sgd"
    made = source.TRAC(inner)
    assert rule_of(made, made.param_groups[0]) is None


def test_eps_is_found_under_the_name_that_its_class_has() -> None:
    weights = [nn.Parameter(torch.ones(4, 4))]
    adam = torch.optim.AdamW(weights, eps=1e-5)
    assert eps_of("adamw", adam.param_groups[0]) == 1e-5
    assert eps_of("adamw", {"epsilon": 1e-6}) == 1e-6
    assert eps_of("shampoo", {"matrix_eps": 1e-4, "eps": 1.0}) == 1e-4
    assert eps_of(None, {"eps": (1e-30, 1e-3)}) is None
    assert eps_of("sgd", torch.optim.SGD(weights).param_groups[0]) is None


def test_no_class_has_two_rules() -> None:
    sets = (ENTRIES_OF_ONE, GRADIENTS, SIGNS)
    assert len(set().union(*sets)) == sum(map(len, sets))
    assert set(BY_NAME.values()) <= set(OPTIMIZERS)


def test_what_dion_trains_by_another_algorithm_has_no_rule_of_muon() -> None:
    class Muon(torch.optim.SGD):
        """As dion's, whose groups say how each of them is trained."""

    weight = nn.Parameter(torch.ones(2, 2))
    for algorithm, rule in (("lion", "lion"), ("adamw", "adamw"), ("dion", None)):
        made = Muon([{"params": [weight], "algorithm": algorithm, "adjust_lr": "rms_norm"}], lr=0.1)
        assert rule_of(made, made.param_groups[0]) == rule


def test_the_schedule_free_adamw_of_its_authors_has_that_rule() -> None:
    class AdamWScheduleFree(Optimizer):
        """Derived from none of torch's classes, as facebookresearch/schedule_free has it."""

    made = AdamWScheduleFree([nn.Parameter(torch.ones(2, 2))], {"lr": 0.1})
    assert rule_of(made, made.param_groups[0]) == "schedule-free"
