import pytest
import torch

from theodolite import UseError
from theodolite.size import Size
from theodolite.surveying import Site
from theodolite.surveying.usable import shapes


def test_the_seed_alone_decides_how_a_model_starts(gpt):
    workload = gpt()
    first, again = Site(workload, workload.size).build(), Site(workload, workload.size).build()
    other = Site(workload, workload.size, seed=1).build()
    assert torch.equal(first.embed.weight, again.embed.weight)
    assert not torch.equal(first.embed.weight, other.embed.weight)


def test_shapes_are_those_of_the_real_model(gpt):
    site = Site(gpt(tied=True), Size(64, 2))
    real = {name: tuple(tensor.shape) for name, tensor in site.build().named_parameters()}
    assert shapes(site, Size(64, 2)) == real


def test_the_network_is_dissected_once(gpt):
    workload = gpt()
    site = Site(workload, workload.size)
    assert site.anatomy is site.anatomy
    assert site.batch is site.batch


def test_an_error_of_use_in_build_is_passed_on_as_it_is(gpt):
    with pytest.raises(UseError, match="multiple") as caught:
        Site(gpt(), Size(63, 2)).build()
    assert "failed" not in str(caught.value)
