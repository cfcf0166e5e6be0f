"""The scale-vector study: its arms start alike, its claims see what is there, its flow is the calculus'."""

import dataclasses
import json

import numpy as np
import pytest
import torch

from theodolite.core.errors import UseError
from theodolite.core.size import Size
from theodolite.fleet.program import repeated
from theodolite.fleet.stack import kin
from theodolite.fleet.training import planned
from theodolite_studies.scale_vectors import flow
from theodolite_studies.scale_vectors import study as scale_vectors
from theodolite_studies.scale_vectors.claims import COMPARISONS
from theodolite_studies.scale_vectors.flow_claims import flow_claims
from theodolite_studies.scale_vectors.networks import workload
from theodolite_studies.scale_vectors.report import report
from theodolite_studies.scale_vectors.study import FULL, SMALL, Arm, make, read, write_summary


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
    for part in FULL.parts[:-1]:
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


def test_the_velocity_is_the_gradient():
    problem = flow.Problem.drawn(0)
    weight, gain = (torch.tensor(each, requires_grad=True) for each in (problem.weight_OD, problem.gain_D))
    moments, target = torch.tensor(problem.moments_DD), torch.tensor(problem.target_OD)
    gap = weight * gain - target
    loss = 0.5 * torch.einsum("od,de,oe->", gap, moments, gap)
    decay = 0.5 * (0.3 * weight.square().sum() + 0.7 * gain.square().sum())
    (loss + decay).backward()
    down, down_gain = problem.velocity(problem.weight_OD, problem.gain_D, on_weight=0.3, on_gain=0.7)
    np.testing.assert_allclose(-weight.grad.numpy(), down, rtol=1e-12)
    np.testing.assert_allclose(-gain.grad.numpy(), down_gain, rtol=1e-12)


@pytest.mark.parametrize("on_gain", [0.0, 0.3])
def test_noise_moves_the_gain_as_ito_says(monkeypatch, on_gain):
    """`d/dt E‖γ‖² = −2μ‖γ‖² − 2aᵀ(a − a*) + Dq`, where all start at one."""
    monkeypatch.setattr(flow, "REPLICAS", 20_000)
    monkeypatch.setattr(flow, "NOISE_TIME", 0.125)
    monkeypatch.setattr(flow, "NOISE_STEP", 0.125 / 8)
    record = flow.noisy_gain(0, on_gain)
    target = np.random.default_rng(1000).normal(size=flow.DIMENSION)
    slope = -2 * on_gain * flow.DIMENSION - 2 * (1 - target).sum() + flow.DIMENSION * flow.NOISE
    # Curved a little over an eighth of a time unit.
    assert record["values"] == [pytest.approx(flow.DIMENSION + 0.125 * slope, abs=0.25)]
    assert record["bound"] == (
        None if not on_gain else pytest.approx(max(4, (4 + 0.5 * (target**2).sum()) / 0.6))
    )


def test_the_claims_of_the_flow_hold_and_a_wrong_formula_fails(monkeypatch):
    monkeypatch.setattr(flow, "NOISE_TIME", 8.0)
    monkeypatch.setattr(flow, "STEPS", tuple(2.0**-exponent for exponent in range(4, 10)))
    records = [*flow.experiments(0), *flow.experiments(1)]
    assert [claim.verdict for claim in flow_claims(records)] == ["holds"] * 8
    spoilt = [{**one, "error": 0.1} if one["kind"] == "flow" else one for one in records]
    assert [claim.verdict for claim in flow_claims(spoilt)].count("fails") == 1


TINY = dataclasses.replace(
    SMALL,
    steps=2,
    warmup=1,
    num=1,
    length=8,
    held_out=1,
    arms=tuple(Arm(each, (-7.0,), (0.5,), 2, size=Size(32, 1)) for each in ("plain", "heterogeneous")),
)


def make_it_small(patch):
    patch.setattr(scale_vectors, "BASE", Size(32, 1))
    patch.setitem(scale_vectors.SETTINGS, "small", TINY)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Two arms of two steps at a base size of 32 × 1."""
    out, said = tmp_path_factory.mktemp("study"), []
    with pytest.MonkeyPatch.context() as patch:
        make_it_small(patch)
        make(out, setting=TINY, parts=["plain", "heterogeneous"], engine="vectorised", tell=said.append)
    assert said == ["plain: 2 runs, 2 of them to make", "heterogeneous: 2 runs, 2 of them to make"]
    return out


@pytest.fixture
def folder(made, monkeypatch):
    make_it_small(monkeypatch)
    return made


def test_what_was_made_is_not_made_again_and_starts_alike(folder):
    said = []
    make(folder, setting=TINY, parts=["plain"], tell=said.append)
    assert said == ["plain: 2 runs, 0 of them to make"]
    _, records = read(folder)
    assert {(one["arm"], one["seed"]) for one in records} == {
        (f"{structure} cosine paper", seed) for structure in ("plain", "heterogeneous") for seed in (0, 1)
    }


def test_a_summary_gathers_parts_from_several_folders_and_tells_the_same(folder, tmp_path):
    summary = tmp_path / "summary.jsonl"
    write_summary(folder, summary)
    about, first, *rest = (json.loads(line) for line in summary.read_text().splitlines())
    assert about["study"] == "scale-vectors"
    assert len(rest) == 3
    other = tmp_path / "other.jsonl"
    other.write_text("".join(f"{json.dumps(each)}\n" for each in (about, first)))
    write_summary(summary, other)
    assert other.read_text() == summary.read_text()
    told, again = report(folder), report(summary)
    assert told.splitlines()[:-1] == again.splitlines()[:-1]
    assert (tmp_path / "summary-differences.svg").exists()


def test_what_is_not_the_study_is_refused(tmp_path):
    with pytest.raises(UseError, match="the study has no part 'plan': it has plain"):
        make(tmp_path, setting=SMALL, parts=["plan"])
    (tmp_path / "other.jsonl").write_text('{"study":"lion"}\n')
    with pytest.raises(UseError, match="is no file of the study scale-vectors"):
        read(tmp_path / "other.jsonl")
