import random

import numpy as np
import pytest
import torch
from torch import nn

from theodolite import UseError, dissect, survey
from theodolite.anatomy.specimen import shapes_of
from theodolite.core.size import Size
from theodolite.surveying import SurveyContext
from theodolite.surveying.trials import trials_of


def test_the_seed_alone_decides_how_a_model_starts(gpt):
    workload = gpt()
    first, again = (
        SurveyContext(workload, workload.size).build(),
        SurveyContext(workload, workload.size).build(),
    )
    other = SurveyContext(workload, workload.size, seed=1).build()
    assert torch.equal(first.embed.weight, again.embed.weight)
    assert not torch.equal(first.embed.weight, other.embed.weight)


def test_shapes_are_those_of_the_real_model(gpt):
    site = SurveyContext(gpt(tied=True), Size(64, 2))
    real = {name: tuple(tensor.shape) for name, tensor in site.build().named_parameters()}
    assert shapes_of(site.build_hollow(Size(64, 2))) == real


def test_the_network_is_dissected_once(gpt, monkeypatch):
    dissected = []

    def look(build, inputs, *, size, roles):
        dissected.append(size)
        return dissect(build, inputs, size=size, roles=roles)

    monkeypatch.setattr("theodolite.surveying.context.dissect", look)
    monkeypatch.setattr("theodolite.surveying.trials.dissect", look)
    workload = gpt()
    site = SurveyContext(workload, workload.size)
    assert site.anatomy is site.anatomy
    assert site.batch is site.batch
    # Also where the trials begin at its own size, unless its roles are for more than they have.
    assert trials_of(site).base == workload.size
    assert sorted(dissected) == sorted([workload.size, *trials_of(site).largest])


def test_of_large_images_the_first_examples_are_taken_unless_there_is_time(rows, monkeypatch):
    def images(seed, step):
        return torch.arange(32.0).reshape(4, 2, 2, 2), torch.arange(4)

    workload = rows(lambda width, depth: nn.Linear(8, width), batch=images)
    monkeypatch.setattr("theodolite.surveying.context.MOST_NUMBERS", 24)
    monkeypatch.setattr("theodolite.surveying.context.FEWEST_EXAMPLES", 2)
    site = SurveyContext(workload, workload.size)
    assert torch.equal(site.inputs, workload.draw(0, 0)[0][:3])
    assert len(site.batch[1]) == 3
    assert len(SurveyContext(workload, workload.size, deep=True).inputs) == 4
    graph = rows(lambda width, depth: nn.Linear(8, width), batch=lambda *_: (torch.eye(8), torch.zeros(8)))
    assert len(SurveyContext(graph, graph.size).inputs) == 8


def test_an_error_of_use_in_build_names_the_workload(gpt):
    with pytest.raises(UseError, match=r"workload 'small': .*width is 63, not a multiple of 16"):
        SurveyContext(gpt(), Size(63, 2)).build()


def test_the_seed_decides_in_numpy_and_python_too(rows):
    def build(width, depth):
        layer = nn.Linear(8, width)
        nn.init.constant_(layer.weight, np.random.rand() + random.random())
        return layer

    first, again, other = (
        SurveyContext(rows(build), Size(32, 2), seed).build().weight[0, 0] for seed in (0, 0, 1)
    )
    assert first == again
    assert first != other


@pytest.mark.parametrize("seed", ["0", 1.5, None, -1, 2**63])
def test_a_seed_is_a_whole_number(gpt, seed):
    with pytest.raises(UseError, match=r"seed is .*: give an integer"):
        survey(gpt(), seed=seed)


def test_a_size_is_a_size(gpt):
    with pytest.raises(UseError, match=r"size is \(32, 2\): give a Size"):
        survey(gpt(), size=(32, 2))
