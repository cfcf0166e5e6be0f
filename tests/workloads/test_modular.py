"""Workloads of modular addition: the network by its formula, what is held out, and what each is made for."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from theodolite import Size, UseError, data, probes
from theodolite.fleet.run import Run
from theodolite.fleet.training import train
from theodolite.workloads import built_in
from theodolite.workloads.modular import adder, grokking, modular_addition


@pytest.mark.parametrize(("activation", "phi"), [("relu", lambda z: np.maximum(z, 0)), ("square", np.square)])
def test_the_network_is_its_formula(activation, phi) -> None:
    model = adder(6, 1, modulus=5, activation=activation)
    w_in, w_out = (weight.detach().numpy() for weight in model.parameters())
    examples = data.modular_addition(5)
    with torch.no_grad():
        found = model(examples.inputs()).reshape(5, 5, 5)
    for x in range(5):
        for y in range(5):
            assert found[x, y].numpy() == pytest.approx(w_out @ phi(w_in[:, x] + w_in[:, y]), abs=1e-5)


def test_initial_weights_are_scaled_and_otherwise_the_same() -> None:
    models = []
    for scale in (1.0, 0.1):
        torch.manual_seed(0)
        models.append(modular_addition(init_scale=scale).build(2000, 1))
    for one, small in zip(*(model.parameters() for model in models), strict=True):
        assert torch.allclose(small, 0.1 * one)
        assert small.std().item() == pytest.approx(0.1 / math.sqrt(small.shape[1]), rel=0.03)


@pytest.mark.parametrize("modulus", [37, 38])
def test_every_batch_of_grokking_is_all_pairs_to_train_on(modulus: int) -> None:
    chosen = grokking(modulus, fraction=0.5)
    (first, labels), (second, _), (unseen, _) = chosen.draw(0, 0), chosen.draw(3, 7), chosen.draw_held_out(0)

    def rows(inputs) -> list[tuple[float, ...]]:
        return sorted(map(tuple, inputs.tolist()))

    assert rows(first) == rows(second)
    assert rows(torch.cat([first, unseen])) == rows(data.modular_addition(modulus).values)
    sums = first @ torch.arange(modulus).float()
    assert torch.equal(sums.long() % modulus, labels)


def test_a_short_run_of_grokking_memorises_and_does_not_generalise() -> None:
    chosen = grokking(37)
    run = Run(
        *(chosen.name, Size(128, 1), 0.01),
        parameterization="standard",
        steps=100,
        weight_decay=1.0,
        held_out=1,
    )
    outcome = train(run, chosen)
    right = outcome.metrics["train accuracy"][-1][1], outcome.metrics["accuracy"][-1][1]
    assert right[0] > 0.95
    assert right[1] < 0.2  # chance is 0.03
    assert outcome.readings["steps to generalise"] == math.inf
    assert [step for step, _ in outcome.metrics["accuracy"]] == [0, 20, 40, 60, 80, 100]


def test_a_small_start_gives_more_neurons_of_one_frequency() -> None:
    found = []
    for scale in (1.0, 0.1):
        chosen = modular_addition(23, init_scale=scale)
        torch.manual_seed(0)
        model = chosen.build(128, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
        for step in range(150):
            optimizer.zero_grad()
            chosen.evaluate(model, chosen.draw(0, step)).backward()
            optimizer.step()
        table = data.modular_addition(23)
        assert torch.equal(model(table.inputs()).argmax(1), table.labels)
        found.append(probes.fourier(model[0].weight, model[-1].weight))
    ordinary, small = found
    assert small.concentrated.double().mean() > ordinary.concentrated.double().mean() + 0.2
    assert small.alignment > 0.95


def test_names_tell_options_apart() -> None:
    assert {"modular-addition", "grokking"} <= set(built_in())
    assert modular_addition().name == "modular-addition"
    assert modular_addition(23, activation="square").name == "modular-addition modulus=23 activation=square"
    assert grokking(fraction=0.9, init_scale=2).name == "grokking fraction=0.9 init_scale=2"


@pytest.mark.parametrize(
    ("make", "wrong", "said"),
    [
        (modular_addition, {"modulus": 2}, "modulus is 2: give an integer, at least 3"),
        (modular_addition, {"activation": "tanh"}, "activation is 'tanh'"),
        (modular_addition, {"init_scale": 0}, "init_scale is 0"),
        (
            grokking,
            {"modulus": 17},
            "modulus is 17: give an integer, at least 29. Fewer pairs do not",
        ),
        (grokking, {"modulus": 59.0}, "modulus is 59.0: give an integer"),
        (grokking, {"fraction": 1.0}, "fraction is 1.0: give a number between 0 and 1, such as 0.75"),
        (grokking, {"fraction": True}, "fraction is True"),
    ],
)
def test_options_that_are_of_no_use_are_refused(make, wrong, said: str) -> None:
    with pytest.raises(UseError, match=said):
        make(**wrong)
