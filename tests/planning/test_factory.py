"""What somebody else's function returns: every form of it, and every mistake named."""

from __future__ import annotations

import functools
import json
import math
import random
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR, ReduceLROnPlateau

from theodolite import Size, UseError
from theodolite.planning.factory import check_pure, make_optimizers, read_options


def build(width: int, depth: int = 1) -> nn.Module:
    return nn.Sequential(nn.Linear(4, width), nn.LayerNorm(width), nn.Linear(width, 2))


def adamw(model: nn.Module) -> AdamW:
    return AdamW(model.parameters(), lr=0.01, weight_decay=0.1, eps=1e-6)


def by_shape(model: nn.Module) -> list[dict[str, Any]]:
    matrices = [one for one in model.parameters() if one.dim() > 1]
    return [
        {"params": matrices, "lr": 0.02},
        {"params": [one for one in model.parameters() if one.dim() < 2], "weight_decay": 0.0},
    ]


def half(step: int) -> float:
    return step / 10


FORMS = {
    "one": adamw,
    "list": lambda model: [adamw(model)],
    "with a scheduler": lambda model: (lambda one: (one, LambdaLR(one, half)))(adamw(model)),
    "with none": lambda model: (adamw(model), None),
    "two lists": lambda model: (lambda one: ([one], [CosineAnnealingLR(one, 5)]))(adamw(model)),
    "plateau": lambda model: (lambda one: (one, ReduceLROnPlateau(one)))(adamw(model)),
    "dictionary": lambda model: {"optimizer": adamw(model), "monitor": "loss", "frequency": 2},
    "dictionary with a scheduler": lambda model: (
        lambda one: {"optimizer": one, "lr_scheduler": {"scheduler": LambdaLR(one, half), "interval": "step"}}
    )(adamw(model)),
    "list of dictionaries": lambda model: [{"optimizer": adamw(model)}],
    "by the user's names": lambda model: {"everything": adamw(model)},
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_optimizer_with_its_learning_rate(form: str) -> None:
    made = make_optimizers(FORMS[form], build(8))
    (optimizer,) = made.optimizers
    assert isinstance(optimizer, AdamW)
    assert optimizer.param_groups[0]["lr"] == 0.01  # LambdaLR has set it to 0
    assert "initial_lr" not in optimizer.param_groups[0]
    said = [note for note in made.notes if "was returned too" in note]
    assert len(said) == (form in ("with a scheduler", "two lists", "plateau", "dictionary with a scheduler"))


def test_the_rate_of_a_cycle_is_its_highest() -> None:
    def make(model: nn.Module) -> Any:
        optimizer = AdamW(by_shape(model), lr=0.01)
        return optimizer, OneCycleLR(optimizer, max_lr=[0.5, 0.25], total_steps=10)

    made = make_optimizers(make, build(8))
    assert [group["lr"] for group in made.optimizers[0].param_groups] == [0.5, 0.25]


def test_a_rate_that_is_a_tensor_stays_one() -> None:
    def make(model: nn.Module) -> Any:
        optimizer = AdamW(model.parameters(), lr=torch.tensor(0.5))
        return optimizer, LambdaLR(optimizer, half)

    (group,) = make_optimizers(make, build(8)).optimizers[0].param_groups
    assert isinstance(group["lr"], torch.Tensor)
    assert group["lr"].item() == 0.5


def test_several_optimizers_keep_their_order() -> None:
    def make(model: nn.Module) -> Any:
        assert isinstance(model, nn.Sequential)
        return {"back": SGD(model[2].parameters(), lr=0.5), "front": adamw(model[0])}

    made = make_optimizers(make, build(8))
    assert [type(one) for one in made.optimizers] == [SGD, AdamW]


def test_an_object_with_an_optimizer_inside_is_looked_into() -> None:
    class Engine:
        def __init__(self, optimizer: Any) -> None:
            self.optimizer = optimizer

    made = make_optimizers(lambda model: Engine(adamw(model)), build(8))
    assert isinstance(made.optimizers[0], AdamW)
    assert made.notes == ("the AdamW inside a Engine was taken",)


def test_optimizers_of_accelerate_and_transformers() -> None:
    accelerate = pytest.importorskip("accelerate")

    def make(model: nn.Module) -> Any:
        accelerator = accelerate.Accelerator(cpu=True)
        optimizer = adamw(model)
        return accelerator.prepare(optimizer, LambdaLR(optimizer, half))

    model = build(8)
    made = make_optimizers(make, model)
    found = read_options(model, made.optimizers)
    assert {one.rule for one in found.values()} == {"adamw"}
    assert {one.lr for one in found.values()} == {0.01}
    assert {one.class_name for one in found.values()} == {"AdamW"}
    assert len(made.notes) == 1


def other_model(model: nn.Module, kept: nn.Module = build(8)) -> Any:  # noqa: B008
    return adamw(kept)


def fails(model: nn.Module) -> Any:
    raise KeyError("lr")


def replaces(model: Any) -> Any:
    model[2] = nn.Linear(8, 3)
    return adamw(model)


def wraps(model: Any) -> Any:
    model[2] = nn.Sequential(model[2])
    return adamw(model)


def adds(model: Any) -> Any:
    model.extra = nn.Linear(3, 3)
    return adamw(model)


def initialises(model: Any) -> Any:
    nn.init.normal_(model[0].weight, std=5)
    return adamw(model)


def exits(model: nn.Module) -> Any:
    raise SystemExit(2)


def wants_more(model: nn.Module, config: Any, *, steps: int, decay: float = 0.1) -> Any:
    return adamw(model)


class WantsMore:
    def __call__(self, model: nn.Module, config: Any) -> Any:
        return adamw(model)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (None, "cannot be called: give a function of the model"),
        (AdamW, r"AdamW is a class: give a function of the model, as in lambda model: AdamW\(model"),
        (adamw(build(8)), "the optimizer's factory AdamW is an optimizer: give a function"),
        (lambda: None, "takes no model"),
        (
            wants_more,
            r"needs config and steps beside the model: bind them, as in functools.partial\(wants_more",
        ),
        (WantsMore(), "needs config beside the model: bind it"),
        (functools.partial(wants_more, config=1), "factory wants_more needs steps beside the model"),
        (lambda model: None, "returned None: return its optimizer"),
        (lambda model: [], "returned a list of 0"),
        (lambda model: (None, None), "returned a tuple of 2"),
        (lambda model: AdamW, "returned the class AdamW"),
        (lambda model: by_shape(model)[0], "returned parameter groups: return an optimizer of them"),
        (lambda model: by_shape(model), "returned parameter groups"),
        (lambda model: model.parameters(), "returned a.* generator: return its optimizer"),
        (lambda model: 0.1, "returned the float 0.1"),
        (lambda model: json.loads("{"), r"failed at test_factory.py:\d+: JSONDecodeError"),
        (fails, r"factory fails failed at test_factory.py:\d+: KeyError: 'lr'"),
        (lambda model: AdamW(model.nothing), r"failed at test_factory.py:\d+: AttributeError"),
        (replaces, "factory replaces replaces 2.weight: change the model where it is built"),
        (wraps, "factory wraps removes 2.weight: change the model where it is built"),
        (adds, "factory adds adds extra.weight: change the model where it is built"),
        (initialises, "factory initialises changes the values of 0.weight: initialise the model where it is"),
        (exits, r"factory exits failed at test_factory.py:\d+: SystemExit: 2"),
        (functools.partial(AdamW, lr=0.1), r"is a class: give a function .* lambda model: AdamW\(model"),
        (other_model, r"trains 6 tensors that the model it was given does not have \(0 are its own\)"),
        (
            lambda model: AdamW([*model.parameters(), nn.Parameter(torch.ones(3))]),
            r"trains 1 tensor that .* \(6 are its own\), one of shape \(3,\)",
        ),
    ],
)
def test_bad_input_is_named(make: Any, said: str) -> None:
    with pytest.raises(UseError, match=said) as caught:
        make_optimizers(make, build(8))
    assert str(caught.value).startswith("the optimizer's factory ")


def test_arguments_that_are_bound_are_not_asked_for() -> None:
    make = functools.partial(wants_more, config={}, steps=3)
    assert len(make_optimizers(make, build(8)).optimizers) == 1
    assert len(make_optimizers(lambda *models: adamw(models[0]), build(8)).optimizers) == 1


def test_random_numbers_of_the_caller_stay() -> None:
    def make(model: nn.Module) -> Any:
        torch.manual_seed(17)
        return adamw(model)

    model = build(8)
    before = torch.get_rng_state()
    make_optimizers(make, model)
    assert torch.equal(torch.get_rng_state(), before)


def test_options_are_read_for_each_tensor() -> None:
    model = build(8)
    assert isinstance(model, nn.Sequential)
    model[1].weight.requires_grad_(False)

    def make(model: nn.Sequential) -> Any:
        groups = [
            {"params": [model[0].weight], "lr": 0.5, "eps": 1e-4},
            {"params": [model[0].bias, model[1].weight], "weight_decay": 0.0},
        ]
        return [
            AdamW(groups, lr=0.01, weight_decay=0.1),
            SGD(model[2].parameters(), lr=0.25, weight_decay=1.0),
        ]

    found = read_options(model, make_optimizers(make, model).optimizers)
    assert {name: one.state for name, one in found.items()} == {
        "0.weight": "trained",
        "0.bias": "trained",
        "1.weight": "frozen",
        "1.bias": "absent",
        "2.weight": "trained",
        "2.bias": "trained",
    }
    weight, bias, last = found["0.weight"], found["0.bias"], found["2.weight"]
    assert (weight.lr, weight.weight_decay, weight.eps, weight.rule, weight.group) == (
        0.5,
        0.1,
        1e-4,
        "adamw",
        0,
    )
    assert (bias.lr, bias.weight_decay, bias.eps, bias.group) == (0.01, 0.0, 1e-8, 1)
    assert (last.lr, last.weight_decay, last.eps, last.rule, last.group) == (0.25, 1.0, None, "sgd", 2)
    assert (weight.decoupled, last.decoupled) == (True, False)
    assert (found["1.bias"].group, found["1.bias"].class_name) == (-1, "")
    assert math.isnan(found["1.bias"].lr)


def test_the_vectors_of_soap_have_the_rule_of_adamw() -> None:
    source = pytest.importorskip("pytorch_optimizer")
    model = build(8)
    found = read_options(model, make_optimizers(lambda one: source.SOAP(one.parameters()), model).optimizers)
    assert {name: one.rule for name, one in found.items() if name.startswith("2.")} == {
        "2.weight": "soap",
        "2.bias": "adamw",
    }


def test_a_tensor_of_two_optimizers_is_there_twice() -> None:
    model = build(8)
    made = make_optimizers(lambda one: [adamw(one), SGD(one[2].parameters(), lr=0.1)], model)
    found = read_options(model, made.optimizers)
    assert [name for name, one in found.items() if one.state == "twice"] == ["2.weight", "2.bias"]
    assert (found["2.weight"].rule, found["2.weight"].lr) == ("adamw", 0.01)  # of the first


def counting(option: str) -> Any:
    values = iter([0.01, 0.005, 0.0025])
    return lambda model: AdamW(model.parameters(), **{"lr": 0.1, option: next(values)})


def counting_tensors() -> Any:
    values = iter([0.5, 0.25])
    return lambda model: AdamW(model.parameters(), lr=torch.tensor(next(values)))


def counting_betas() -> Any:
    values = iter([0.5, 0.25])
    return lambda model: AdamW(model.parameters(), betas=(next(values), 0.9))


def first_named(*numbers: int) -> Any:
    calls = iter(numbers)
    return lambda model: AdamW([*model.named_parameters()][: next(calls)])


def first_tensors(*numbers: int) -> Any:
    calls = iter(numbers)
    return lambda model: AdamW([*model.parameters()][: next(calls)])


def another_class() -> Any:
    kinds = iter([AdamW, torch.optim.Adam])
    return lambda model: next(kinds)(model.parameters(), lr=0.1, weight_decay=0.0)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (counting("lr"), "0.weight with lr 0.01, then 0.005"),
        (counting("eps"), "0.weight with eps 0.01, then 0.005"),
        (counting_tensors(), "0.weight with lr 0.5, then 0.25"),
        (counting_betas(), r"0.weight with betas \[0.5, 0.9\], then \[0.25, 0.9\]"),
        (first_named(6, 5), "1 group with 2.bias, then 0"),
        (first_tensors(6, 5), "1 group with 2.bias, then 0"),
        (first_tensors(5, 6), "0 groups with 2.bias, then 1"),
        (
            lambda model: AdamW(model.parameters(), lr=float(torch.rand(()))),
            "0.weight with lr 0.4.*, then 0.7",
        ),
        (lambda model: AdamW(model.parameters(), lr=random.random()), "0.weight with lr 0.8.*, then 0.1"),
        (another_class(), "0.weight with class 'AdamW', then 'Adam'"),
    ],
)
def test_what_a_factory_keeps_between_calls_is_named(make: Any, said: str) -> None:
    with pytest.raises(UseError, match=f"keeps state between calls: for the same model it made {said}"):
        check_pure(make, build, Size(8, 1))


def test_pure_factories_pass() -> None:
    for make in (adamw, FORMS["two lists"], lambda model: AdamW(by_shape(model), betas=(0.8, 0.9))):
        check_pure(make, build, Size(8, 1))


def test_a_model_that_is_kept_is_found_at_the_second_call() -> None:
    kept: list[nn.Module] = []

    def make(model: nn.Module) -> Any:
        kept.append(model)
        return adamw(kept[0])

    with pytest.raises(UseError, match="that the model it was given does not have"):
        check_pure(make, build, Size(8, 1))


def test_a_group_without_its_schedule_has_the_options_of_one_that_never_had_any() -> None:
    def cycling(model: nn.Module) -> Any:
        optimizer = SGD(model.parameters(), lr=0.01, momentum=0.9)
        return optimizer, OneCycleLR(optimizer, max_lr=0.5, total_steps=10)

    (group,) = make_optimizers(cycling, build(8)).optimizers[0].param_groups
    plain = SGD(build(8).parameters(), lr=0.01, momentum=0.9)
    assert set(group) == set(plain.param_groups[0])


def test_schedules_of_one_class_are_noted_once() -> None:
    def make(model: nn.Module) -> Any:
        assert isinstance(model, nn.Sequential)
        optimizers = [adamw(model[0]), adamw(model[2])]
        return optimizers, [LambdaLR(one, half) for one in optimizers]

    (note,) = make_optimizers(make, build(8)).notes
    assert note.startswith("a LambdaLR was returned too")
