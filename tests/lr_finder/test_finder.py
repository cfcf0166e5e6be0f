import copy
import json
import math
import random
import re
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import theodolite as th
from theodolite.core.errors import UseError
from theodolite.core.size import Size
from theodolite.lr_finder import LrRange, find_lr
from theodolite.lr_finder.finder import CLOSE, SLACK
from theodolite.workloads import Workload

CURVATURES = torch.tensor([0.5, 1.0, 3.0, 8.0], dtype=torch.float64)


class Bowl(nn.Module):
    """`½ Σ λ_i x_i²`, the coordinates in two tensors."""

    def __init__(self):
        super().__init__()
        self.flat = nn.Parameter(torch.ones(2, dtype=torch.float64))
        self.steep = nn.Parameter(torch.ones(2, dtype=torch.float64))

    def forward(self, curvatures):
        return (curvatures * torch.cat([self.flat, self.steep]).square()).sum() / 2


def itself(value, _):
    return value


def bowl(optimizer="sgd", **options):
    return find_lr(Bowl(), itself, (CURVATURES, None), optimizer=optimizer, seeds=1, **options)


def network(width=16):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, width), nn.BatchNorm1d(width), nn.Dropout(0.1), nn.Linear(width, 2))


def rows(num=6, size=16):
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(size, 8, generator=generator) for _ in range(num)]
    return [(one, (one.sum(1) > 0).long()) for one in inputs]


def small(**changes):
    def build(width, depth):
        return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 2))

    def batch(seed, step):
        generator = torch.Generator().manual_seed(1_000_003 * seed + step)
        inputs = torch.randn(64, 8, generator=generator)
        return inputs, (inputs.sum(1) > 0).long()

    given = {"build": build, "batch": batch, "loss": nn.functional.cross_entropy, "size": Size(32, 1)}
    return Workload("small", **given | changes)


# What it finds


def test_on_a_quadratic_the_upper_end_of_gradient_descent_is_two_over_the_largest_eigenvalue():
    found = bowl(steps=60)
    edge = 2 / float(CURVATURES.max())
    assert edge / CLOSE <= found.high <= edge * 1.01
    assert found.found
    # After many steps the best rate is that of the largest and the smallest eigenvalue: 2/(λ_1 + λ_n).
    best = 2 / float(CURVATURES.max() + CURVATURES.min())
    assert found.best == pytest.approx(best, rel=0.1)


def test_the_upper_end_of_one_step_is_where_the_loss_after_it_is_that_before_it():
    # Σ λ (1 − ηλ)² = Σ λ at η = 2 Σλ²/Σλ³.
    edge = 2 * float(CURVATURES.square().sum() / CURVATURES.pow(3).sum())
    found = bowl(steps=1)
    assert edge / CLOSE <= found.high <= edge * 1.01


@pytest.mark.parametrize("rate", [0.05, 0.2])
def test_each_leg_is_gradient_descent_from_the_same_start(rate):
    found = bowl(steps=7, low=rate, high=8 * rate)
    (curve,) = found.curves
    assert curve.start == pytest.approx(float(CURVATURES.sum()) / 2)
    for leg in curve.trials:
        if math.isfinite(leg.loss):
            exact = (CURVATURES * (1 - leg.rate * CURVATURES) ** 14).sum() / 2
            assert leg.loss == pytest.approx(float(exact))


def test_the_lower_end_makes_a_tenth_of_the_greatest_progress():
    found = bowl(steps=7)
    (curve,) = found.curves

    def progress(rate):
        return curve.start - float((CURVATURES * (1 - rate * CURVATURES) ** 14).sum() / 2)

    assert progress(found.low) == pytest.approx(
        0.1 * (curve.start - min(trial.loss for trial in curve.trials)), rel=0.2
    )


def test_groups_keep_their_ratios_and_their_rates_are_told():
    model = Bowl()
    groups = [{"params": [model.flat], "lr": 0.01}, {"params": [model.steep], "lr": 0.0025}]
    found = find_lr(
        model, itself, (CURVATURES, None), optimizer=torch.optim.SGD(groups), seeds=1, steps=60, high=100.0
    )
    # Steps are those of the curvatures (0.5, 1, 3/4, 8/4), in units of the highest rate.
    edge = 2 / max(1.0, 8.0 / 4)
    assert edge / CLOSE <= found.high <= edge * 1.01
    assert list(found.rates) == ["flat", "steep"]
    assert found.rates["flat"] == pytest.approx(found.best)
    assert found.rates["steep"] == pytest.approx(found.best / 4)
    assert found.factor == pytest.approx(found.best / 0.01)


def test_a_plan_a_function_and_a_name_are_the_same_optimizer_at_its_own_size():
    workload = small()
    inputs = workload.draw(0, 0)[0]
    plan = th.plan(workload.build, inputs, size=Size(32, 1), base=Size(32, 1), lr=0.25)

    def make(model):
        return torch.optim.AdamW(model.parameters(), lr=0.5, weight_decay=0.0)

    options = {"seeds": 1, "steps": 5, "low": 1e-3, "high": 1.0}
    by_name, by_plan, by_hand = (find_lr(workload, optimizer=one, **options) for one in ("adamw", plan, make))
    assert by_plan.low == pytest.approx(by_name.low, rel=1e-4)
    assert by_plan.best == pytest.approx(by_name.best, rel=1e-4)
    assert by_plan.factor == pytest.approx(4 * by_name.factor, rel=1e-4)
    assert by_hand.factor == pytest.approx(by_hand.best / 0.5)


def test_seeds_agree_on_the_narrowest_interval_and_spread_the_best():
    found = find_lr(small(), seeds=3, steps=8)
    alone = [find_lr(small(), seeds=[seed], steps=8) for seed in range(3)]
    assert found.high == min(one.high for one in alone)
    assert found.low == max(one.low for one in alone)
    bests = [one.best for one in alone]
    assert found.spread == pytest.approx((min(bests), max(bests)))
    assert found.spread[0] < found.best < found.spread[1]


def test_schedule_free_is_judged_by_its_average():
    # Against steps by hand.
    rates = (0.01, 0.1)
    plan_of = {"optimizer": "schedule-free", "weight_decay": 0.0}
    workload = small(batch=lambda seed, step: small().draw(0, 0))
    inputs = workload.draw(0, 0)[0]
    plan = th.plan(workload.build, inputs, size=Size(32, 1), base=Size(32, 1), lr=rates[0], **plan_of)
    found = find_lr(workload, optimizer=plan, seeds=1, steps=6, low=rates[0], high=rates[1])
    legs = {leg.rate: leg.loss for leg in found.curves[0].trials}
    for rate in rates:
        model = plan.build(0).train()
        optimizer = plan.optimizer(model)
        for group in optimizer.param_groups:
            group["lr"] *= rate / plan.lr
        for step in range(6):
            optimizer.zero_grad()
            workload.evaluate(model, workload.draw(0, step)).backward()
            optimizer.step()
        judges = [workload.draw_held_out(step) for step in range(8)]
        while_training = sum(workload.evaluate(model, one).item() for one in judges) / 8
        optimizer.eval()
        averaged = sum(workload.evaluate(model, one).item() for one in judges) / 8
        assert legs[rate] == pytest.approx(averaged, rel=1e-5)
        assert abs(while_training / averaged - 1) > 1e-3


def test_sparse_gradients_and_empty_groups_are_as_dense_and_absent_ones():
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(0, 20, (32, 1), generator=generator)

    def found(sparse, begun=False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(20, 8, sparse=sparse), nn.Flatten(), nn.Linear(8, 3))
        groups = [{"params": list(model.parameters())}]
        if sparse:
            groups.append({"params": [], "lr": 100.0})
        optimizer = torch.optim.SGD(groups, lr=0.1)
        batch = words, words[:, 0] % 3
        if begun:
            nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
        made = find_lr(
            model, nn.functional.cross_entropy, batch, optimizer=optimizer, seeds=1, steps=5, high=1e4
        )
        assert (model[0].weight.grad is None) is not begun
        return made

    dense, other = found(sparse=False), found(sparse=True, begun=True)
    assert (other.low, other.high) == pytest.approx((dense.low, dense.high), rel=1e-5)
    assert other.rates == pytest.approx(dense.rates, rel=1e-3)
    empty = torch.optim.SGD([{"params": []}], lr=1.0)
    with pytest.raises(UseError, match="hold no tensor"):
        find_lr(Bowl(), itself, (CURVATURES, None), optimizer=empty, seeds=1, steps=1)


def test_it_trains_where_gradients_are_off():
    expected = bowl(steps=7)
    with torch.no_grad():
        assert bowl(steps=7).best == expected.best
        assert not torch.is_grad_enabled()


def test_training_at_the_best_rate_beats_training_at_both_ends():
    found = find_lr(small(), optimizer="sgd", seeds=2, steps=10, high=1000.0)
    ends = {}
    for rate in (found.low, found.best, found.high * 4):
        model = small().build(32, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        for step in range(10):
            optimizer.zero_grad()
            small().evaluate(model, small().draw(9, step)).backward()
            optimizer.step()
        ends[rate] = small().evaluate(model, small().draw_held_out(0)).item()
    assert min(ends, key=ends.get) == found.best


# What it says where there is nothing to find


def test_a_loss_that_never_falls_has_no_interval():
    def noise(seed, step):
        generator = torch.Generator().manual_seed(1_000_003 * seed + step)
        return torch.randn(16, 8, generator=generator), torch.randint(2, (16,), generator=generator)

    def build(width, depth):
        model = small().build(width, depth)
        nn.init.zeros_(model[2].weight)  # at chance, which nothing can beat
        nn.init.zeros_(model[2].bias)
        return model

    found = find_lr(small(build=build, batch=noise), seeds=4, steps=3)
    # By chance it is lower after some legs.
    assert any(leg.loss < curve.start for curve in found.curves for leg in curve.trials)
    assert not any(curve.falls for curve in found.curves)
    assert (found.low, found.high, found.best, found.spread, found.rates) == (None, None, None, None, {})
    assert not found.found
    assert "never falls" in found.status
    assert "never falls" in str(found)


def test_ends_that_were_not_reached_are_open():
    above = bowl(steps=5, low=1e-3, high=0.1)
    assert not above.found
    assert "open above: even 0.1" in above.status
    below = bowl(steps=5, low=0.1, high=10.0)
    assert "open below" in below.status
    assert "the lowest rate, 1, already raises the loss" in bowl(steps=5, low=1.0, high=10.0).status


# What it refuses


def test_what_cannot_be_used_is_refused_by_name():
    model, data = network(), rows()
    loss = nn.functional.cross_entropy
    broken = network()
    broken[3].weight.data[0, 0] = math.nan
    with pytest.raises(UseError, match=r"3\.weight is not finite"):
        find_lr(broken, loss, data, optimizer="sgd")

    def cracked(value, targets):
        return (value - value.detach()).square().sum().sqrt() + loss(value, targets)  # √ at 0

    with pytest.raises(UseError, match=r"gradient of .* is not finite before the first step"):
        find_lr(model, cracked, data, optimizer="sgd")
    with pytest.raises(UseError, match="LBFGS calls the loss several times"):
        find_lr(model, loss, data, optimizer=torch.optim.LBFGS(model.parameters()))
    safe = th.controllers.SafeStep(torch.optim.SGD(model.parameters(), lr=1.0), model, loss)
    with pytest.raises(UseError, match=r"a step of SafeStep needs batch.*safe\.optimizer"):
        find_lr(model, loss, data, optimizer=safe)
    with pytest.raises(UseError, match="the batches are empty"):
        find_lr(model, loss, [], optimizer="sgd")
    with pytest.raises(UseError, match="the batches are empty"):
        find_lr(model, loss, [(torch.zeros(0, 8), torch.zeros(0))], optimizer="sgd")
    with pytest.raises(UseError, match="can be iterated more than once"):
        find_lr(model, loss, iter(data), optimizer="sgd")
    with pytest.raises(UseError, match="loss and batches missing"):
        find_lr(model)
    with pytest.raises(UseError, match="leave loss and batches out"):
        find_lr(small(), batches=data)
    with pytest.raises(UseError, match="each seed of a workload builds its own"):
        find_lr(small(), optimizer=torch.optim.SGD(model.parameters(), lr=1.0))
    with pytest.raises(UseError, match="none of the model's"):
        find_lr(model, loss, data, optimizer=torch.optim.SGD(network(8).parameters(), lr=1.0))
    with pytest.raises(UseError, match="their ratios are kept"):
        find_lr(model, loss, data, optimizer=torch.optim.SGD(model.parameters(), lr=0.0))
    with pytest.raises(UseError, match="only adamw and sgd go by name"):
        find_lr(model, loss, data, optimizer="muon")
    for options in ({"low": 0.0}, {"low": 1.0, "high": 0.5}, {"seeds": 0}, {"steps": 0}, {"seeds": [-1]}):
        with pytest.raises(UseError, match=next(iter(options))):
            find_lr(small(), **options)


def test_replicas_are_refused():
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=store)
    try:
        replica = nn.parallel.DistributedDataParallel(network())
        for model in (replica, nn.Sequential(replica)):
            with pytest.raises(UseError, match=r"is a DistributedDataParallel.*model\.module"):
                find_lr(model, nn.functional.cross_entropy, rows(), optimizer="sgd", seeds=1, steps=1)
    finally:
        torch.distributed.destroy_process_group()


# What it leaves behind


class Stream(IterableDataset):
    """Reads on where it was, as a file does."""

    def __init__(self):
        self.left = iter(list(zip(*rows(1, 64)[0], strict=True)))

    def __iter__(self):
        yield from self.left


def test_nothing_is_lost_of_data_that_read_on():
    stream = Stream()
    for data in (DataLoader(stream, 4), stream):
        with pytest.raises(UseError, match=r"islice\(data, 10\)"):
            find_lr(network(), nn.functional.cross_entropy, data, optimizer="sgd", seeds=1, steps=2)
    assert len(list(stream)) == 64


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_an_epoch_of_persistent_workers_goes_on():
    inputs = torch.arange(80.0)[:, None].repeat(1, 8)
    data = TensorDataset(inputs, torch.zeros(80, dtype=torch.long))
    loader = DataLoader(data, 8, num_workers=1, persistent_workers=True)
    epoch = iter(loader)
    seen = [next(epoch)[0][0, 0].item() for _ in range(2)]
    find_lr(
        network(), nn.functional.cross_entropy, loader, optimizer="sgd", seeds=1, steps=1, low=1e-3, high=1e-2
    )
    assert seen + [batch[0][0, 0].item() for batch in epoch] == [8.0 * place for place in range(10)]


def test_hooks_of_a_given_optimizer_are_silent_and_those_of_one_that_is_made_are_part_of_it():
    calls = []

    def make(model):
        made = torch.optim.SGD(model.parameters(), lr=0.1)
        made.register_step_post_hook(lambda *_: calls.append("made"))
        return made

    model = Bowl()
    given = make(model)
    for optimizer, called in ((given, 0), (make, 2)):
        find_lr(model, itself, (CURVATURES, None), optimizer=optimizer, seeds=1, steps=1, low=0.01, high=0.02)
        assert len(calls) >= called
        assert bool(calls) == bool(called)
    calls.clear()
    given.step()
    assert calls == ["made"]


def state_of(model, optimizer, loader):
    return copy.deepcopy(
        {
            "weights": model.state_dict(),
            "gradients": {name: tensor.grad for name, tensor in model.named_parameters()},
            "modes": [module.training for module in model.modules()],
            "calls": model.calls,
            "optimizer": optimizer.state_dict(),
            "called": getattr(optimizer, "_opt_called", None),
            "loader": (loader.generator.get_state(), loader._iterator),
            "random": (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()),
        }
    )


def same(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


class Counting(nn.Module):
    """Counts its calls, draws random numbers of every kind, and holds a frozen part in eval mode."""

    def __init__(self):
        super().__init__()
        self.inner, self.calls = network(), 0
        self.frozen = nn.BatchNorm1d(8).eval()

    def forward(self, inputs):
        self.calls += 1
        random.random(), np.random.rand()
        return self.inner(self.frozen(inputs))


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("stop", [None, KeyboardInterrupt, RuntimeError])
def test_no_trace_is_left(begun, stop):
    model = Counting()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, amsgrad=True)
    inputs, labels = (torch.cat(part) for part in zip(*rows(), strict=True))
    generator = torch.Generator().manual_seed(3)
    loader = DataLoader(TensorDataset(inputs, labels), 16, shuffle=True, generator=generator)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    loss = nn.functional.cross_entropy
    if begun:
        loss(model(inputs), labels).backward()
        optimizer.step()
        schedule.step()
    model.eval()
    model.inner.train()
    before = state_of(model, optimizer, loader)
    weights = [tensor.data_ptr() for tensor in model.parameters()]
    legs = []

    def progress(title, done):
        legs.append(done)
        if stop is not None and len(legs) > 3:
            raise stop("enough")

    def run():
        return find_lr(model, loss, loader, optimizer=optimizer, seeds=2, steps=4, progress=progress)

    if stop is None:
        run()
    else:
        with pytest.raises(stop, match="enough"):
            run()
    assert same(state_of(model, optimizer, loader), before)
    assert [tensor.data_ptr() for tensor in model.parameters()] == weights
    assert legs == sorted(legs)
    assert len(legs) > 3


def test_the_same_numbers_come_out_again_and_no_state_of_the_caller_matters():
    model = network()

    def found():
        made = find_lr(model, nn.functional.cross_entropy, rows(), optimizer="adamw", seeds=2, steps=4)
        return [(leg.rate, leg.loss) for curve in made.curves for leg in curve.trials]

    first = found()
    torch.manual_seed(7)
    torch.rand(5)
    assert found() == first


def test_what_makes_an_optimizer_may_draw_random_numbers():
    def make(model):
        torch.rand(3), random.random(), np.random.rand()
        return torch.optim.SGD(model.parameters(), lr=0.1)

    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    find_lr(small(), optimizer=make, seeds=1, steps=1)
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert same(after, before)


# Page and JSON


def test_the_page_and_its_json_say_the_same(tmp_path):
    found = bowl(steps=10)
    assert found.sentence in found.save(tmp_path / "lr.html").read_text()
    facts = json.loads(found.save(tmp_path / "lr.json").read_text())
    assert (facts["low"], facts["high"], facts["best"]) == (found.low, found.high, found.best)
    assert [leg["rate"] for leg in facts["curves"][0]["trials"]] == [
        leg.rate for leg in found.curves[0].trials
    ]
    assert facts["rates"] == found.rates
    assert LrRange.load(tmp_path / "lr.json") == found
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(UseError, match="holds no learning-rate range"):
        found.save(tmp_path / "other.json")


def test_the_table_tells_which_rates_are_inside():
    found = bowl(steps=10)
    lines = [line.split() for line in str(found).splitlines() if re.match(r"\d\.\d\de", line)]
    rates = [float(words[0]) for words in lines]
    assert rates == sorted(rates)
    assert all(
        found.low * 0.99 <= rate <= found.high * 1.01
        for rate, words in zip(rates, lines, strict=True)
        if words[-1] == "yes"
    )
    assert [words[1] for words in lines if float(words[0]) > 2 * found.high].count("diverges") >= 1
    assert isinstance(found, LrRange)
    for (low, _), (high, _) in pairwise((leg.rate, leg.loss) for leg in found.curves[0].trials):
        assert high / low <= 4 * (1 + SLACK)
