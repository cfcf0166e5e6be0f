"""The arms of the scale-vector study start alike and differ in their vectors alone."""

import dataclasses

import pytest
import torch

from theodolite.core.size import Size
from theodolite.fleet.plans import planned
from theodolite.fleet.program import repeated
from theodolite.fleet.stack import kin
from theodolite_studies.scale_vectors.arms import FULL, SMALL, Arm, workload
from theodolite_studies.scale_vectors.claims import COMPARISONS


def small(structure):
    return workload(structure, text="sotu", num=2, length=16)


def test_arms_start_as_the_same_function():
    """Paired by seed: the same start, bit by bit, whatever surgery calls the tensors."""
    logits = []
    for structure in ("plain", "removed", "direction", "all"):
        run = SMALL.run(Arm(structure, (-7.0,), (0.5,), 1), -7.0, 0.5, 3)
        network = small(structure)
        model = planned(dataclasses.replace(run, size=Size(32, 1)), network).build(3)
        logits.append(model(network.batch(3, 0)[0]))
    for other in logits[1:]:
        torch.testing.assert_close(other, logits[0], rtol=0, atol=1e-5)


def test_the_structures_differ_in_their_vectors_alone():
    def vectors(structure):
        return sum(
            tensor.numel() for tensor in small(structure).build(64, 2).parameters() if tensor.dim() == 1
        )

    # Two blocks: q, k, v of 64 outputs read one norm, gate and up of 192 another, 256 logits the last.
    assert vectors("plain") == 64 * 5
    assert vectors("removed") == 0
    assert vectors("heterogeneous") == 64 * (2 * 5 + 1)
    assert vectors("both") == 64 * 5 + 2 * (3 * 64 + 2 * 192) + 256
    assert vectors("direction") == (64 + 1) * 5
    assert vectors("all") == 64 * 11 + 2 * (3 * 64 + 2 * 192) + 256 + 2 * 11
    assert vectors("peri") == 64 * 9


@pytest.mark.parametrize("structure", ["plain", "heterogeneous", "direction", "all"])
def test_blocks_with_vectors_in_them_are_still_one_compilation(structure):
    assert [len(blocks) for blocks in repeated(small(structure).build(32, 3))] == [3]


def test_a_part_is_one_program():
    for part in {arm.part for arm in FULL.arms}:
        arms = [arm for arm in FULL.arms if arm.part == part]
        runs = [run for arm in arms for run in FULL.runs(arm)]
        assert len({run.identity for run in runs}) == len(runs)
        assert len({(run.workload, run.size, run.optimizer) for run in runs}) == 1
    plain = [arm for arm in FULL.arms if arm.part == "plain"]
    network = workload("plain", text="sotu", num=2, length=16)
    assert len({kin(FULL.runs(arm)[0], network) for arm in plain}) == 1


def test_every_comparison_is_between_arms_that_are_run():
    names = {arm.name for arm in FULL.arms}
    assert {each.first for each in COMPARISONS} | {each.second for each in COMPARISONS} == names
    arms = {arm.name: arm for arm in FULL.arms}
    for each in COMPARISONS:
        first, second = arms[each.first], arms[each.second]
        assert first.num_seeds == second.num_seeds >= 3
        assert (first.exponents, first.decays) == (second.exponents, second.decays)


def test_decay_is_large_enough_to_matter():
    """lr·λ summed over the steps is about one or more at the larger decay."""
    for arm in FULL.arms:
        assert 0.5 * 2.0 ** max(arm.exponents) * FULL.steps * max(arm.decays) > 1
