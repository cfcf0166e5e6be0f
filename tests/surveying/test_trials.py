import dataclasses
from functools import partial

import pytest
import torch
from torch import nn

from theodolite.core.errors import UseError
from theodolite.core.size import Size
from theodolite.models import ResidualMLP
from theodolite.surveying import SurveyContext, trials
from theodolite.surveying.budget import first_of
from theodolite.surveying.finding import Finding
from theodolite.surveying.trials import Unplannable, Untried, find_trials
from theodolite.workloads import Workload, next_token_loss


def test_trials_are_narrow_shallow_and_larger_than_the_base(rows):
    workload = rows(partial(ResidualMLP, inputs=8, outputs=2))
    found = find_trials(SurveyContext(workload, Size(256, 6)))
    assert found.base == Size(64, 2)
    assert found.widths == (Size(128, 2), Size(256, 2))
    assert found.depths == (Size(64, 8),)
    deep = find_trials(SurveyContext(workload, Size(256, 6), deep=True))
    assert deep.widths[-1] == Size(512, 2)
    assert deep.depths == (Size(64, 4), Size(64, 8), Size(64, 16))


def test_plans_of_the_two_kinds(gpt):
    found = find_trials(SurveyContext(gpt(), Size(64, 2)))
    wide = found.widths[-1]
    name = "blocks.0.feed_forward.branch.up.weight"
    assert found.planned(wide)[name].lr == found.standard(wide)[name].lr / 4
    assert found.standard(wide).base == wide
    assert found.planned(found.base) is found.standard(found.base)


def test_widths_at_which_the_proportions_break_are_passed_over(rows):
    """Two key/value heads at width 128, but never less than one: at 64 the proportion is another."""

    def build(width, depth):
        shared = max(1, width // 64) * 16 if width >= 128 else 24
        return nn.Sequential(nn.Linear(8, width), nn.Linear(width, shared), nn.Linear(shared, 2))

    assert find_trials(SurveyContext(rows(build), Size(256, 2))).base == Size(128, 2)


def test_trials_that_are_too_large_are_an_error_of_use(gpt, monkeypatch):
    monkeypatch.setattr(trials, "MOST_PARAMETERS", 1000)
    with pytest.raises(UseError, match="networks wider than 64 × 2 have over 1,000 parameters") as caught:
        find_trials(SurveyContext(gpt(), Size(64, 2)))
    assert not isinstance(caught.value, Unplannable)


def test_trials_that_take_much_work_have_fewer_examples_and_sizes_and_say_so(rows, monkeypatch):
    workload = rows(partial(ResidualMLP, inputs=8, outputs=2))
    site = SurveyContext(workload, Size(64, 2))
    whole = find_trials(site)
    assert whole.left_out == ()
    halved = dataclasses.replace(
        whole, workload=dataclasses.replace(workload, batch=lambda *at: first_of(workload.draw(*at), 2))
    )
    most = max(halved.forward_work(size) for size in (*whole.widths, *whole.depths)) + 1
    monkeypatch.setattr(trials, "MOST_WORK", most)
    found = find_trials(site)
    assert (found.widths, found.depths, found.left_out) == (whole.widths, whole.depths, ())
    assert found.setting["examples in a batch"] == 2
    narrow = halved.forward_work(whole.widths[0])
    monkeypatch.setattr(trials, "MOST_WORK", narrow - 1)
    found = find_trials(site)
    assert (found.widths, found.depths) == (whole.widths[:1], ())
    assert found.left_out == (Size(256, 2), Size(64, 8))
    finding = found.noted(Finding("TH201", "ok", "Values", "All is well.", why=""))
    assert finding.sentence == ("All is well. 256 × 2 and 64 × 8 were left out: too much work.")
    assert finding.evidence.numbers["left out, too much work"] == "256 × 2, 64 × 8"
    monkeypatch.setattr(trials, "MOST_LEAST_WORK", narrow - 1)
    with pytest.raises(Untried, match="a forward pass of 128 × 2 takes "):
        find_trials(site)
    deep = dataclasses.replace(site, deep=True)
    assert len(find_trials(deep).widths) == 3


def test_batches_are_cut_but_stay_the_same_examples(rows):
    def batch(seed, step):
        inputs = torch.arange(512.0).reshape(64, 8) + step
        return inputs, torch.arange(64)

    def build(width, depth):
        return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 64))

    workload = rows(build, batch=batch, size=Size(64, 2))
    cut = find_trials(SurveyContext(workload, workload.size)).workload.draw(0, 3)
    assert torch.equal(cut[0], batch(0, 3)[0][:64])
    assert torch.equal(cut[1], torch.arange(64))
    whole = find_trials(SurveyContext(workload, workload.size, deep=True)).workload
    assert whole is workload

    def windows(seed, step):
        tokens = torch.randint(1000, (16, 129), generator=torch.Generator().manual_seed(step))
        return tokens[:, :-1], tokens[:, 1:]

    def bigram(width, depth):
        return nn.Sequential(nn.Embedding(1000, width), nn.Linear(width, 1000))

    words = Workload("words", bigram, windows, next_token_loss, Size(64, 2))
    inputs, targets = find_trials(SurveyContext(words, words.size)).workload.draw(0, 1)
    assert inputs.shape == targets.shape == (4, 128)  # 512 tokens
    assert torch.equal(inputs, windows(0, 1)[0][:4])


def test_a_batch_whose_examples_cannot_be_told_apart_is_left_whole(rows):
    def batch(seed, step):
        return torch.ones(100, 8), torch.zeros(100, dtype=torch.long), torch.tensor(1.0)

    def pair(seed, step):
        inputs, targets, scalar = batch(seed, step)
        return inputs, {"targets": targets, "scale": scalar}

    def loss(logits, targets):
        return targets["scale"] * nn.functional.cross_entropy(logits, targets["targets"])

    def build(width, depth):
        return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 2))

    workload = rows(build, batch=pair, loss=loss, size=Size(64, 2))
    inputs, _ = find_trials(SurveyContext(workload, workload.size)).workload.draw(0, 0)
    assert len(inputs) == 100


class Odd(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.first, self.last = nn.Linear(8, width), nn.Linear(width, 2)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.shifts = nn.ParameterList(torch.zeros(3, 5) for _ in range(depth))

    def forward(self, x):
        x = self.first(x)
        for block, shift in zip(self.blocks, self.shifts, strict=True):
            x = x + block(x.relu()) + 0 * shift.sum()
        return self.last(x)


def test_roles_for_tensors_of_deeper_networks_are_no_hindrance(rows):
    workload = rows(Odd)
    roles = {"shifts.*": "bias", "shifts.5": "bias"}
    found = find_trials(SurveyContext(workload, Size(64, 6), roles=roles))
    assert found.roles == {"shifts.*": "bias"}
