"""The study of norm placements: its readings, its runs, and claims on records whose verdict is known."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch

from theodolite.errors import UseError
from theodolite.fleet.training import train
from theodolite.studies import norm_placement
from theodolite.studies.norm_placement import FULL, SMALL, STUDY, cells, run_of, trained, workload_of
from theodolite.studies.norm_placement_claims import claims
from theodolite.studies.norm_placement_reading import read_stream
from theodolite.studies.norm_placement_values import Table
from theodolite.studies.records import Records
from theodolite.studies.study import report
from theodolite.writing import write_whole

TINY = dataclasses.replace(SMALL, seeds=(0, 1), steps=6, warmup=1, num=2, length=16, held_out=2)


def test_cells_come_in_the_order_of_their_worth():
    order = [(cell["placement"], cell["depth"]) for cell in cells(False)]
    assert order[:3] == [("pre", 16), ("post", 16), ("peri", 16)]
    assert set(order[:12]) == set(itertools.product(("pre", "post", "peri"), (4, 8, 16, 32)))
    assert len(FULL.seeds) >= 3


# Reading the stream


def test_the_stream_of_branches_that_add_nothing_is_the_embedding():
    """Then h_l = e for all l, and the loss has the same gradient with respect to each."""
    workload = workload_of(TINY, "pre")
    model = workload.build(64, 3)
    for name, parameter in model.named_parameters():
        if name.endswith(("branch.out.weight", "down.weight")):
            torch.nn.init.zeros_(parameter)
    inputs, targets = workload.draw_held_out(0)
    embedded = model.embed(inputs).detach().requires_grad_()
    loss = workload.loss(model.readout(model.norm(embedded)), targets) * targets.numel()
    (gradient,) = torch.autograd.grad(loss, embedded)
    reading = read_stream(model, dict(model.state_dict()), workload)
    size = embedded.square().mean().sqrt().item()
    assert gradient.abs().max() > 0
    assert reading["stream"] == pytest.approx([size] * 4, rel=1e-3)
    assert reading["gradient"] == pytest.approx([gradient.square().mean().sqrt().item()] * 4, rel=1e-3)
    entries = embedded.abs()
    assert reading["peak"] == pytest.approx((entries.max() / entries.median()).item(), rel=1e-3)


def test_reading_leaves_no_trace():
    workload = workload_of(TINY, "post")
    model = workload.build(64, 2).train()
    model.blocks[1].eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modes, state = [module.training for module in model.modules()], torch.get_rng_state()
    read_stream(model, dict(model.state_dict()), workload)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(block._forward_hooks for block in model.blocks)


# Training


def test_networks_come_out_as_the_fleet_trains_them_alone():
    workload, depth = workload_of(TINY, "peri"), 2
    wanted = [("plan", 0, -6), ("standard", 1, -8)]
    records = trained(TINY, workload, depth, wanted, "cpu")
    for each, record in zip(wanted, records, strict=True):
        alone = train(run_of(TINY, workload, depth, *each), workload)
        assert record["held_out"] == pytest.approx(alone.held_out, abs=2e-4)
        norms = [norm for _, norm in alone.metrics["gradient"]][TINY.warmup :]
        unrest = np.abs(np.diff(np.log2(norms))).mean()
        assert record["unrest"] == pytest.approx(unrest, rel=1e-2)
    read, other = records
    assert list(read["stream"]) == ["0", "1", "3", "6"]
    assert all(len(sizes) == depth + 1 for sizes in read["stream"].values())
    assert "stream" not in other


def test_a_network_that_diverges_is_a_result(monkeypatch):
    workload = workload_of(TINY, "pre")
    monkeypatch.setattr(norm_placement, "LOOK_EVERY", 2)
    (record,) = trained(TINY, workload, 2, [("standard", 0, 40)], "cpu")
    assert record["held_out"] is None
    assert record["unrest"] is None


def test_what_is_too_large_for_memory_is_made_in_halves(monkeypatch):
    made = []

    def scarce(setting, workload, depth, wanted, device):
        if len(wanted) > 2:
            raise torch.OutOfMemoryError
        made.extend(wanted)
        return [{"each": each} for each in wanted]

    monkeypatch.setattr(norm_placement, "trained", scarce)
    found = list(norm_placement.run({"placement": "pre", "depth": 4, "small": True}))
    assert sorted(made) == sorted(itertools.product(("base",), SMALL.seeds, SMALL.exponents))
    assert len(found) == len(made)


# Claims


def streams(placement, depth, *, troubled):
    """Sizes before and after training, and gradients, over the blocks."""
    part = np.linspace(0, 1, depth + 1)
    if placement == "post":
        return np.ones(depth + 1), np.ones(depth + 1), 10.0 ** (3 * part * troubled)
    grown = {"pre": 4.0 ** (4 * part), "peri": np.sqrt(1 + depth * part)}[placement]
    return np.sqrt(1 + part), grown if troubled else np.sqrt(1 + 3 * part), 2.0 ** (1 - part)


def ideal(*, plan_helps=True, peri_gain=-0.02):
    """What the paper says, with a little noise between seeds."""
    records = []
    grid = itertools.product(("pre", "post", "peri"), (4, 16), range(3), (-8, -7, -6, -5))
    for placement, depth, seed, exponent in grid:
        for kind in ("base",) if depth == 4 else ("plan", "standard"):
            troubled = kind == "standard" or (kind == "plan" and not plan_helps)
            noise = 0.001 * seed
            loss = 2.0 - 0.01 * math.log2(depth) * (1 + noise) + 0.04 * (exponent + 7) ** 2 + noise
            own = {"pre": 0.0, "peri": peri_gain * (1 + 0.1 * seed), "post": 0.3 + noise}[placement]
            loss += own * troubled
            if placement == "peri":
                loss -= 0.02 * max(0, exponent + 7) ** 2 * (1 + 0.1 * seed)
            diverged = placement == "post" and exponent > -7 and troubled
            record = {"placement": placement, "depth": depth, "small": False, "parameterization": kind}
            record |= {"lr": exponent, "seed": seed, "held_out": None if diverged else loss, "unrest": 0.1}
            if exponent == -7:
                before, after, slope = (one.tolist() for one in streams(placement, depth, troubled=troubled))
                record["unrest"] = 0.1 if placement == "peri" else 0.2 + noise
                record["stream"] = {"0": before, "9": [size * (1 + noise) for size in after]}
                record["gradient"] = {"0": slope, "9": slope}
                record["peak"] = {"0": 4.0, "9": 100.0 if placement == "pre" else 10.0}
            records.append(record)
    return records


def verdicts(records):
    return {each.claim: each.verdict for each in claims(records)}


def test_a_world_as_the_paper_has_it_meets_all_claims():
    found = verdicts(ideal())
    assert len(found) == 22
    assert [claim for claim, verdict in found.items() if verdict != "holds"] == []


def test_a_world_in_which_peri_is_worse_fails_where_it_should():
    found = verdicts(ideal(peri_gain=0.05))
    assert found["each at its best, peri ends better than pre"] == "fails"
    assert found["training makes pre's variance grow"] == "holds"


def test_differences_within_noise_are_unclear():
    records = ideal(peri_gain=0.0)
    for record in records:
        if record["placement"] == "peri" and record["held_out"] is not None:
            record["held_out"] += (-1) ** record["seed"] * 0.01
    assert verdicts(records)["each at its best, peri ends better than pre"] == "unclear"


def test_a_plan_that_does_nothing_is_seen():
    found = verdicts(ideal(plan_helps=False))
    assert found["with the plan post's gradients do not vanish"] == "fails"
    assert found["with the plan the placements end closer together"] != "holds"


def test_a_network_that_fails_at_all_learning_rates_alike_does_not_count_as_stable():
    """All of them are near its own best, and far from what others reach."""
    records = [one for one in ideal() if one["parameterization"] != "plan"]
    for record in records:
        if record["placement"] == "post":
            record["held_out"] = 3.0
    reach = Table(records).of("post", 16, "standard").reach
    assert reach.tolist() == [0, 0, 0]


def test_half_a_study_gives_the_claims_it_can():
    records = [one for one in ideal() if one["depth"] == 16 and one["placement"] != "peri"]
    found = verdicts(records)
    assert found["at the start post's gradients vanish"] == "holds"
    assert "and more than peri's" not in found
    assert "with the plan the best learning rate stays, wherever the norms are" not in found


def test_the_report_is_drawn_from_the_file(tmp_path):
    file = tmp_path / "norm-placement.jsonl"
    Records(file, {"study": STUDY.name}).append(ideal())
    text = report(STUDY, file)
    assert "22 of 22 claims hold" in text
    assert "peri − pre × 16 standard" in text
    for name in ("stream", "gradient", "rates"):
        assert (tmp_path / f"norm-placement-{name}.svg").read_text().startswith("<svg")


def test_records_of_a_small_study_are_not_mixed_in():
    small = [{**one, "small": True, "held_out": 9.0} for one in ideal()]
    assert verdicts([*ideal(), *small]) == verdicts(ideal())


def test_a_file_of_another_study_is_refused(tmp_path):
    write_whole(tmp_path / "lion.jsonl", '{"study":"lion"}\n{"seed":0}\n')
    with pytest.raises(UseError, match="no file of the study 'norm-placement'"):
        report(STUDY, tmp_path / "lion.jsonl")
