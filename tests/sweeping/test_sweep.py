"""From a workload to a table, over the command line and without it. All of it on tiny networks."""

import dataclasses
import json
import math

import pytest
import torch

import theodolite as th
from theodolite.cli import main
from theodolite.core.errors import UseError
from theodolite.fleet.driver import check_engine
from theodolite.fleet.engine import Resources
from theodolite.fleet.ledger import Ledger
from theodolite.fleet.run import Run
from theodolite.fleet.training import train
from theodolite.sweeping import Range, Sweep, sweep

from ..shared_anatomies import shared_anatomies

FILE = """
import math
from pathlib import Path
import torch
from torch import nn
from theodolite import Size, Workload

class Net(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        if depth == 9:
            raise ValueError("nine is too deep")
        self.first, self.last = nn.Linear(4, width), nn.Linear(width, 2)
        self.hidden = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x):
        x = self.first(x)
        for hidden in self.hidden:
            x = x + hidden(x).relu()
        return self.last(x)

def batch(seed, step):
    if seed == 1 and step == 2 and Path("trouble").exists():
        raise {"stop": KeyboardInterrupt, "fail": OSError}[Path("trouble").read_text()]("disk gone")
    inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(1000 * seed + step))
    return inputs, (inputs.sum(1) > 0).long()

def movement(model):
    return sum(weight.abs().sum().item() for weight in model.parameters())

def narrow(model):
    return math.inf if model.first.out_features > 8 else 3.0

def optimizer(model):
    width = model.first.out_features
    hidden = [weight for weight in model.parameters() if weight.shape == (width, width)]
    vectors = [weight for weight in model.parameters() if not any(weight is one for one in hidden)]
    rates = {"lr": 8 * 2**-5 / width}
    return torch.optim.AdamW([{"params": hidden, **rates}, {"params": vectors}], lr=2**-5)

metrics = {"movement": movement, "iterations": narrow}
tiny = Workload("tiny", Net, batch, nn.functional.cross_entropy, Size(8, 1), metrics=metrics,
                optimizer=optimizer)
"""
FEW = ["--widths", "8,16", "--lr", "2^-6:2^-4", "--seeds", "2", "--steps", "6", "--held-out", "2"]
FEW += ["--engine", "serial"]
NUM_FEW = 2 * 3 * 2 * 2
FEWER = ["--widths", "8,16", "--lr", "2^-5:2^-4", "--seeds", "2", "--steps", "4", "--held-out", "1"]
FEWER += ["--engine", "serial", "--parameterization", "plan"]
NUM_FEWER = 2 * 2 * 2
GOOD = {"lr": [2**-5], "seeds": 1, "steps": 4, "held_out": 1, "engine": "serial"}


@pytest.fixture(autouse=True, scope="module")
def _dissected_once():
    """Each test writes the file anew, and the network in it is always the same."""
    with shared_anatomies("fleet.plans", known_by=lambda build: FILE):
        yield


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    (tmp_path / "mine.py").write_text(FILE)
    return tmp_path


def command(capsys, *arguments):
    """Status, standard output and standard error of `theodolite sweep mine.py:tiny …`."""
    with pytest.raises(SystemExit) as left:
        main(["sweep", "mine.py:tiny", *arguments])
    printed = capsys.readouterr()
    return left.value.code or 0, printed.out, printed.err


def rows_in(folder):
    with Ledger.read(folder) as ledger:
        return ledger.rows()


def test_a_command_gives_tables_a_page_and_a_ledger_with_the_losses_of_a_plain_run(tiny, capsys):
    status, out, err = command(capsys, *FEW)
    assert status == 0
    assert "adamw, plan from 8 × 1: held-out loss against log2 of lr, 2 seeds" in out
    assert "adamw, standard: held-out loss" in out
    assert f"{NUM_FEW} runs of 6 steps: 8 × 1, 16 × 1;" in err
    rows = rows_in("sweep")
    assert len(rows) == NUM_FEW
    # One run made by hand: the same loss in the ledger, and as a mean with the other seed in the table.
    one = Run(
        "mine.py:tiny", th.Size(16, 1), lr=2**-5, base=th.Size(8, 1), seed=1, steps=6, held_out=2, warmup=0
    )
    made = [train(dataclasses.replace(one, seed=seed), th.workload(one.workload)) for seed in (0, 1)]
    (row,) = [row for row in rows if row["identity"] == one.identity]
    assert row["held_out"] == made[1].held_out
    (line,) = [line for line in out.split("\n\n")[1].splitlines() if line.startswith("16 × 1")]
    assert f"{(made[0].held_out + made[1].held_out) / 2:.3f}" in line
    page = (tiny / "sweep" / "sweep.html").read_text()
    assert "lr of mine.py:tiny" in page
    assert "https://" not in page.partition("<script>")[0]
    data = json.loads((tiny / "sweep" / "sweep.json").read_text())
    assert data["families"][0]["optima"][0]["size"] == {"width": 8, "depth": 1}


def test_the_same_command_runs_nothing_twice_and_more_values_are_added(tiny, capsys):
    command(capsys, *FEWER)
    before = {row["identity"]: row["seconds"] for row in rows_in("sweep")}
    status, _, err = command(capsys, *FEWER)
    assert status == 0
    assert f"{NUM_FEWER} were there before, 0 finished" in err
    further = [{"2": "3", "2^-5:2^-4": "2^-6:2^-4", "8,16": "8,16,32"}.get(word, word) for word in FEWER]
    status, out, err = command(capsys, *further)
    assert status == 0
    assert f"{NUM_FEWER} were there before, {3 * 3 * 3 - NUM_FEWER} finished" in err
    assert "3 seeds" in out
    after = {row["identity"]: row["seconds"] for row in rows_in("sweep")}
    assert {identity: after[identity] for identity in before} == before


def test_another_sweep_in_the_same_folder_is_refused(tiny, capsys):
    command(capsys, *FEWER)
    status, _, err = command(capsys, *FEWER, "--weight-decay", "0.1")
    assert status == 2
    assert "fixed.weight_decay is 0.0 there and 0.1 here" in err


def test_a_run_that_fails_is_told_and_run_again_by_the_same_command(tiny, capsys):
    (tiny / "trouble").write_text("fail")
    status, out, err = command(capsys, *FEWER)
    assert status == 1
    assert f"{NUM_FEWER // 2} finished, 0 diverged, {NUM_FEWER // 2} failed" in err
    assert "disk gone" in err
    assert "The same command again runs only these" in err
    assert "1 seed\n" in out  # the other seed is analysed
    (tiny / "trouble").unlink()
    status, out, err = command(capsys, *FEWER)
    assert status == 0
    assert f"{NUM_FEWER // 2} were there before, {NUM_FEWER // 2} finished" in err
    assert "2 seeds\n" in out


def test_ctrl_c_exits_with_130_and_the_same_command_goes_on(tiny, capsys):
    (tiny / "trouble").write_text("stop")
    status, _, err = command(capsys, *FEWER)
    assert status == 130
    assert "the same command again continues here" in err
    (tiny / "trouble").unlink()
    assert command(capsys, *FEWER)[0] == 0
    assert len(rows_in("sweep")) == NUM_FEWER


def test_read_says_the_same_as_the_sweep_that_ran(tiny, capsys):
    _, out, _ = command(capsys, *FEWER)
    assert f"{Sweep.load('sweep')}\n" == out


def test_another_quantity_can_be_swept_and_the_best_of_both_is_found(tiny):
    made = sweep(
        "mine.py:tiny",
        lr=[2**-5, 2**-4],
        axes={"weight_decay": [0.0, 0.5], "options.betas": [(0.9, 0.95), (0.5, 0.5)]},
        parameterization="plan",
        over="weight_decay",
        seeds=2,
        steps=6,
        held_out=1,
        engine="serial",
    )
    assert len(made.rows) == 2 * 2 * 2 * 2
    assert [family.others["lr"] for family in made.families] == [2**-5, 2**-5, 2**-4, 2**-4]
    assert {tuple(family.others["options.betas"]) for family in made.families} == {(0.9, 0.95), (0.5, 0.5)}
    (best,) = made.bests
    losses = {}
    for row in made.rows:
        key = (row["lr"], row["weight_decay"], tuple(row["options.betas"]))
        losses.setdefault(key, []).append(row["held_out"])
    least = min(losses, key=lambda key: sum(losses[key]))
    settings = best.settings
    assert (settings["lr"], settings["weight_decay"], tuple(settings["options.betas"])) == least
    assert "best of all" in str(made)


def test_a_metric_takes_the_place_of_the_loss(tiny, capsys):
    status, out, _ = command(capsys, *FEWER, "--metric", "movement")
    assert status == 0
    assert "adamw, plan from 8 × 1: movement against log2 of lr, 2 seeds" in out
    rows = [row for row in rows_in("sweep") if row["width"] == 16]
    # Weights of one run made by hand, and the mean with the other seed in the table.
    one = {"base": th.Size(8, 1), "steps": 4, "held_out": 1, "warmup": 0}
    made = {
        (lr, seed): train(
            Run("mine.py:tiny", th.Size(16, 1), lr=lr, seed=seed, **one), th.workload("mine.py:tiny")
        )
        for lr in (2**-5, 2**-4)
        for seed in (0, 1)
    }
    moved = {key: outcome.readings["movement"] for key, outcome in made.items()}
    assert {(row["lr"], row["seed"]): row["movement"] for row in rows} == moved
    means = {lr: (moved[lr, 0] + moved[lr, 1]) / 2 for lr in (2**-5, 2**-4)}
    read = Sweep.load("sweep", metric="movement")
    assert f"{read}\n" == out
    (family,) = read.families
    assert family.curves[1].means.tolist() == pytest.approx(list(means.values()))
    assert family.optimum(th.Size(16, 1)).best == min(means, key=means.get)
    # The losses of the same runs say otherwise.
    (by_loss,) = Sweep.load("sweep").families
    assert by_loss.optimum(th.Size(16, 1)).best == max(means, key=means.get)
    assert Sweep.load("sweep/sweep.json").metric == "movement"
    assert str(Sweep.load("sweep/sweep.json", metric="held-out loss")) == str(Sweep.load("sweep"))


def test_an_infinite_metric_is_no_number_and_no_divergence(tiny, capsys):
    status, out, _ = command(capsys, *FEWER, "--metric", "iterations")
    assert status == 0
    (line,) = [line for line in out.splitlines() if line.startswith("16 × 1")]
    assert line.split()[3:] == ["inf", "inf", "all", "infinite"]
    assert "diverge" not in out
    assert f"{Sweep.load('sweep/sweep.json')}\n" == out
    assert {row["status"] for row in rows_in("sweep")} == {"finished"}
    with pytest.raises(UseError, match=r"has no metric 'iteration'\. Did you mean 'iterations'\?"):
        Sweep.load("sweep", metric="iteration")


def test_a_search_by_a_metric_finds_the_least_of_it(tiny):
    pytest.importorskip("optuna")
    given = {
        "lr": [2**-9, 2**-3],
        "search": "tpe",
        "trials": 6,
        "parameterization": "plan",
        "widths": [8, 16],
    }
    given["axes"] = {"weight_decay": Range(0.01, 1.0)}
    made = sweep("mine.py:tiny", **{**GOOD, **given}, metric="movement")
    trials = {}
    for row in made.rows:
        if row["width"] == 8:
            trials.setdefault((row["lr"], row["weight_decay"]), row)
    tried = list(trials)[:6]
    lr, decay = min(tried, key=lambda key: trials[key]["movement"])
    assert decay != min(tried, key=lambda key: trials[key]["held_out"])[1]
    (family,) = made.families
    assert family.others == {"weight_decay": decay}
    assert family.curves[1].values == pytest.approx((lr / 2, lr, 2 * lr))


def test_a_search_finds_what_its_trials_say_and_a_second_one_runs_nothing(tiny):
    pytest.importorskip("optuna")
    given = {
        "widths": [8, 16],
        "lr": [2**-9, 2**-3],
        "axes": {"weight_decay": Range(0.01, 1.0)},
        "search": "tpe",
        "trials": 7,
        "parameterization": "plan",
        "seeds": [5, 0],
        "steps": 6,
        "held_out": 1,
        "engine": "serial",
    }
    made = sweep("mine.py:tiny", **given)
    # Seven trials of two seeds at the base, then three learning rates at two sizes, one of them a trial.
    assert len(made.rows) == 7 * 2 + 3 * 2 * 2 - 2
    # A run that is asked for twice is one run, and was not there before.
    report = made.report
    assert (report.total, report.before, report.finished) == (len(made.rows), 0, len(made.rows))
    trials = {}
    for row in made.rows:
        if row["width"] == 8:
            mine = trials.setdefault((row["lr"], row["weight_decay"]), {})
            mine[row["seed"]] = row["held_out"]
    first_trials = list(trials)[:7]
    lr, decay = min(first_trials, key=lambda key: sum(trials[key].values()))
    assert (lr, decay) != min(first_trials, key=lambda key: trials[key][5])  # one seed would choose another
    (family,) = made.families
    assert family.others == {"weight_decay": decay}
    assert family.curves[1].values == pytest.approx((lr / 2, lr, 2 * lr))
    again = sweep("mine.py:tiny", **given)
    assert (again.report.before, again.report.finished) == (again.report.total, 0)
    longer = sweep("mine.py:tiny", **{**given, "trials": 9})
    assert longer.report.finished >= 4
    assert len(longer.rows) == len(again.rows) + longer.report.finished


def test_ctrl_c_ends_a_search(tiny):
    pytest.importorskip("optuna")
    (tiny / "trouble").write_text("stop")
    made = sweep("mine.py:tiny", **GOOD | {"lr": [2**-9, 2**-3], "seeds": 2}, search="tpe", trials=20)
    assert made.report.stopped
    assert made.report.total == 5 * 2 * 1  # nothing was asked for after the first five
    assert len(made.rows) == 1


def test_a_workload_may_be_an_object(tiny):
    workload = th.workload("mine.py:tiny")
    made = sweep(
        workload, lr=2**-5, seeds=[4], steps=4, held_out=1, engine="serial", parameterization="standard"
    )
    assert [row["seed"] for row in made.rows] == [4]
    assert math.isfinite(made.families[0].optima[0].loss)


@pytest.mark.parametrize(
    "given, said",
    [
        ({"lr": []}, "axis lr is empty"),
        ({"lr": [0.0]}, "lr is 0.0: give a positive finite number"),
        ({"lr": [-0.1]}, "lr is -0.1"),
        ({"lr": [math.nan]}, "lr is nan"),
        ({"lr": Range(0.1, 1.0)}, "lr is a range from 0.1 to 1: list values, or search='tpe'"),
        ({"seeds": 0}, "seeds is 0"),
        ({"seeds": []}, "give at least one seed"),
        ({"optimizer": "adamv"}, "Did you mean 'adamw'?"),
        ({"optimizer": []}, "axis optimizer is empty"),
        ({"parameterization": "mup"}, "parameterization is 'mup'"),
        ({"axes": {"wieght_decay": [0.1]}}, "Did you mean 'weight_decay'?"),
        ({"axes": {"weight_decay": []}}, "axis weight_decay is empty"),
        ({"axes": {"seed": [1]}}, "seed cannot be one of the axes"),
        ({"axes": {"lr": [1]}}, "lr is among the axes"),
        (
            {"axes": {"weight_decay": [0.1]}, "weight_decay": 0.1},
            "weight_decay is an axis of the grid and fixed",
        ),
        ({"over": "weight_decay"}, "over is 'weight_decay', which is no axis"),
        ({"axes": {"decay": ["paper", "none"]}, "over": "decay"}, "which is no number, so it has no optimum"),
        (
            {"metric": "iteration"},
            "mine.py:tiny has no metric 'iteration'. Did you mean 'iterations'? It has mov",
        ),
        ({"search": "random"}, "search is 'random'"),
        ({"search": "tpe"}, "a search needs a lower and an upper end"),
        ({"search": "tpe", "lr": [0.1, 0.2], "trials": 0}, "trials is 0"),
        ({"engine": "fast"}, "engine is 'fast'"),
        ({"steps": 0}, "steps is 0"),
        ({"warmup": 4}, "warmup is 4"),
        ({"widths": [0]}, "width is 0"),
        ({"momentum": 0.9}, "'momentum' is no field of a run"),
        ({"warmup": 3, "axes": {"warmup": [0, 2]}}, "warmup is an axis of the grid and fixed at 3"),
        ({"axes": {"steps": [4, 8]}}, "steps is an axis of the grid and fixed at 4"),
        ({"steps": None, "axes": {"steps": [4, 8]}}, "give warmup, such as 0"),
        ({"options": {"momentun": 0.9}, "optimizer": "sgd"}, "Did you mean 'momentum'?"),
        ({"optimizer": ["adamw", "sgd"], "axes": {"options.betas": [(0.9, 0.9)]}}, "no option of SGD"),
        (
            {"optimizer": "muon-kimi", "vector_options": {"beta": 0.9}},
            "'beta' is no option of AdamW. Did you mean 'betas'?",
        ),
        ({"sizes": [th.Size(8, 1), th.Size(16, 9)]}, "build(width=16, depth=9) failed: ValueError: nine"),
        ({"final": 1.5}, "final is 1.5"),
        ({"device": "gpu"}, "device is 'gpu': it is cpu, cuda or cuda:1"),
        ({"device": "meta"}, "device is 'meta': it is cpu, cuda or cuda:1"),
        ({"address": "auto"}, "which is for a Ray cluster, and the engine is serial"),
        ({"per_run": {"GPU": 0.5}}, "which is for a Ray cluster, and the engine is serial"),
        ({"out": "sweep.sqlite"}, "out is sweep.sqlite, a file: it is the folder"),
    ],
)
def test_bad_input_is_refused_before_anything_is_made(tiny, given, said):
    with pytest.raises(UseError) as refused:
        sweep("mine.py:tiny", **{**GOOD, **given})
    assert said in str(refused.value)
    assert {path.name for path in tiny.iterdir()} <= {"mine.py", "__pycache__"}


def test_a_gpu_that_is_not_there_is_refused_unless_a_cluster_may_have_it(tiny, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(UseError, match=r"device is 'cuda', but torch .* sees no GPU here"):
        sweep("mine.py:tiny", **GOOD, device="cuda")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: False)  # nobody looks for their random states
    with pytest.raises(UseError, match="device is 'cuda:2', but there are 2 GPUs"):
        sweep("mine.py:tiny", **GOOD, device="cuda:2")
    assert not (tiny / "sweep").exists()
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    check_engine("ray", Resources(device="cuda", per_run={"GPU": 1}))
    check_engine("auto", Resources(device="cuda", address="ray://head:10001"))


def test_an_option_with_a_default_can_be_an_axis(tiny, capsys):
    few = ["--lr", "2^-5", "--seeds", "1", "--engine", "serial", "--parameterization", "plan"]
    few += ["--axis", "schedule=linear,cosine", "--axis", "held_out=1,2", "--axis", "steps=4,6"]
    status, out, err = command(capsys, *few, "--axis", "warmup=0,2")
    assert status == 0
    assert "16 runs of 4 to 6 steps:" in err
    rows = rows_in("sweep")
    assert {(row["schedule"], row["held_out_batches"], row["steps"], row["warmup"]) for row in rows} == {
        (schedule, batches, steps, warmup)
        for schedule in ("linear", "cosine")
        for batches in (1, 2)
        for steps in (4, 6)
        for warmup in (0, 2)
    }
    assert "adamw, plan, held_out 2, schedule cosine, steps 6, warmup 0 from 8 × 1" in out


@pytest.mark.parametrize(
    "option, axis",
    [
        (["--schedule", "linear"], "schedule=linear,cosine"),
        (["--warmup", "3"], "warmup=0,2"),
        (["--held-out", "16"], "held_out=1,2"),
        (["--steps", "500"], "steps=4,8"),
    ],
)
def test_what_is_an_option_and_an_axis_is_refused(tiny, capsys, option, axis):
    status, _, err = command(capsys, "--lr", "2^-5", "--engine", "serial", *option, "--axis", axis)
    assert status == 2
    assert f"{axis.partition('=')[0]} is given twice: as {option[0]} and as an --axis" in err
    assert not (tiny / "sweep").exists()


def test_what_was_run_needs_no_plan(tiny, monkeypatch):
    sweep("mine.py:tiny", **GOOD)
    monkeypatch.setattr("theodolite.fleet.plans.planned", lambda *_: pytest.fail("planned again"))
    assert sweep("mine.py:tiny", **GOOD).report.before == 2


def test_an_unknown_workload_and_a_folder_that_cannot_be_are_refused(tiny):
    with pytest.raises(UseError, match="Did you mean 'mlp-mixture'"):
        sweep("mlp-mixtures", **GOOD)
    with pytest.raises(UseError, match="give a Workload, or a name such as"):
        sweep(3, **GOOD)
    with pytest.raises(UseError, match=r"mine\.py"):
        sweep("mine.py:tiny", **GOOD, out="mine.py")


def test_a_ledger_of_something_else_is_no_sweep(tiny):
    Ledger.open("other", name="other", spec={}).close()
    with pytest.raises(UseError, match="not that of a sweep"):
        Sweep.load("other")


def test_the_optimizer_of_the_workload_is_swept_beside_the_plan_and_the_standard(tiny, capsys):
    status, out, err = command(capsys, *FEW, "--parameterization", "own,plan,standard")
    assert status == 0
    assert f"{NUM_FEW * 3 // 2} runs of 6 steps" in err
    assert "1 optimizer, 3 parameterizations, 3 learning rates, 2 seeds" in err
    titles = ("own: held-out loss", "adamw, plan from 8 × 1: held-out loss", "adamw, standard: held-out loss")
    assert all(f"{title} against log2 of lr, 2 seeds" in out for title in titles)
    made = Sweep.load("sweep")
    assert [family.title for family in made.families] == ["own", "adamw, plan", "adamw, standard"]
    (figure,) = made.figures()
    assert [panel.title for panel in figure.panels] == ["own", "adamw, plan", "adamw, standard"]
    assert figure.caption.startswith("own and adamw: held-out loss")
    own = next(family for family in made.families if family.title == "own")
    assert [transfer.size.width for transfer in own.transfers] == [8, 16]
    one = Run(
        **{"workload": "mine.py:tiny", "size": th.Size(16, 1), "lr": 2**-4, "seed": 1, "steps": 6},
        **{"held_out": 2, "optimizer": "own", "parameterization": "own"},
    )
    (row,) = [row for row in rows_in("sweep") if row["identity"] == one.identity]
    assert row["held_out"] == train(one, th.workload(one.workload)).held_out
    assert (row["optimizer"], row["parameterization"]) == ("own", "own")


def test_a_sweep_of_own_alone_has_a_figure_and_refuses_what_its_optimizer_has(tiny):
    made = sweep("mine.py:tiny", parameterization="own", widths=[8, 16], **{**GOOD, "lr": [2**-6, 2**-5]})
    assert [family.title for family in made.families] == ["own"]
    assert len(made.figures()) == 1
    mixed = {"parameterization": ["own", "standard"], "weight_decay": 0.1, "out": "mixed", **GOOD}
    assert sweep("mine.py:tiny", **mixed).spec["fixed"]["weight_decay"] == 0.1  # of the standard runs
    with pytest.raises(UseError, match="weight_decay"):
        sweep("mine.py:tiny", **{**mixed, "weight_decay": 0.2})
    with pytest.raises(UseError, match=r"weight_decay is 0.1: with the own parameterization"):
        sweep("mine.py:tiny", parameterization="own", weight_decay=0.1, out="other", **GOOD)
    with pytest.raises(UseError, match="eps is an axis, and the own parameterization has what"):
        sweep(
            "mine.py:tiny", axes={"eps": [1e-8, 1e-6]}, parameterization=["own", "plan"], out="other", **GOOD
        )
    with pytest.raises(UseError, match=r"says nothing of its optimizer: give Workload\("):
        sweep("mlp-mixture", parameterization="own", out="other", **GOOD)
    with pytest.raises(UseError, match=r"optimizer is 'lion': with the own parameterization it is the work"):
        sweep("mine.py:tiny", parameterization="own", optimizer="lion", out="other", **GOOD)


def test_tensors_that_the_own_optimizer_leaves_out_are_named(tiny, capsys):
    """The first layer's weight is in no group, and the command says so before the runs are made."""
    (tiny / "careless.py").write_text(f"""{FILE}
tiny = Workload("tiny", Net, batch, nn.functional.cross_entropy, Size(8, 1),
                optimizer=lambda model: torch.optim.AdamW([*model.parameters()][1:], lr=0.01))
""")
    with pytest.raises(SystemExit):
        main(["sweep", "careless.py:tiny", *FEWER[:-1], "own"])
    said = capsys.readouterr().err
    assert said.count("In no group of the optimizer, and so left as they start: first.weight (1 tensor)") == 1
    assert said.startswith("own, AdamW at ")


def test_a_folder_of_another_own_optimizer_is_refused(tiny):
    """A change of how the rate goes with the width is none at base size, and its results are others."""

    def workload(power):
        def make(model):
            rate = 2**-5 * (8 / model.first.out_features) ** power
            return torch.optim.AdamW(model.parameters(), lr=rate)

        return dataclasses.replace(th.workload("mine.py:tiny"), optimizer=make)

    given = {"widths": [8, 16], "parameterization": ["own", "plan"], **GOOD}
    sweep(workload(0), **given)
    assert sweep(workload(0), **given).report.before == 4
    with pytest.raises(UseError, match="the optimizer of tiny at 16 × 1 differs from that of the own"):
        sweep(workload(1), **given)
    assert sweep(workload(1), **{**given, "parameterization": ["plan"]}).report.before == 2


def test_own_is_searched_once_whatever_the_optimizers(tiny, monkeypatch):
    pytest.importorskip("optuna")
    said = []
    monkeypatch.setattr("theodolite.fleet.driver.RunListener.said", lambda self, line: said.append(line))
    made = sweep(
        "mine.py:tiny",
        optimizer=["adamw", "sgd"],
        parameterization=["own", "standard"],
        search="tpe",
        trials=2,
        **{**GOOD, "lr": [2**-8, 2**-4]},
    )
    assert [line.partition(":")[0] for line in said if "a search at" in line] == [
        *("own", "adamw, standard", "sgd, standard")
    ]
    searched = [row for row in made.rows if row["optimizer"] == "own"]
    assert len(searched) == 2 + 2  # trials, and half and twice the best
    assert sorted(family.title for family in made.families) == ["adamw, standard", "own", "sgd, standard"]
    assert [len(figure.panels) for figure in made.figures()] == [2, 2]


BATCHES = ["--batches", "4:16", "--tokens", "32,64", "--lr", "2^-10,2^-7,2^-5,2^-2,2^5"]
BATCHES += ["--seeds", "1", "--held-out", "1", "--engine", "serial", "--product"]
BATCHES += ["--parameterization", "plan", "--horizon", "sde+timescale"]


def test_a_command_sweeps_over_batches_and_tokens_and_measures_a_rule(tiny, capsys):
    """One target for each example, and 8 examples in a usual batch."""
    status, out, err = command(capsys, *BATCHES)
    assert status == 0
    sizes = [th.Size(8, 1, batch, tokens) for batch in (4, 8, 16) for tokens in (32, 64)]
    assert f"{6 * 5} runs of 2 to 16 steps: batch 4, 32 tokens, batch 4, 64 tokens, " in err
    rows = rows_in("sweep")
    assert len(rows) == 6 * 5
    for row in rows:
        assert row["steps"] == row["planned_tokens"] / row["batch"] == row["tokens"] / row["batch"]
        assert (row["base_batch"], row["base_planned_tokens"]) == (4, 32)
        assert row["warmup"] == row["steps"] // 10
        assert row["horizon"] == "sde+timescale"
    one = Run(
        *("mine.py:tiny", sizes[-1], 2**-5),
        base=sizes[0],
        seed=0,
        steps=4,
        held_out=1,
        horizon="sde+timescale",
    )
    (row,) = [row for row in rows if row["identity"] == one.identity]
    assert row["held_out"] == train(one, th.workload(one.workload).with_batch(16)).held_out
    made = Sweep.load("sweep")
    assert made.base == sizes[0]
    assert [curve.size for curve in made.families[0].curves] == sizes
    assert made.families[0].optimum(made.base).found  # a rate of 32 is too large, one of 2^-10 too small
    table = out.rpartition("beyond the rates")[2]
    assert {line.split()[0] for line in table.splitlines() if line.count("  ") > 3} >= {"none", "sde"}
    # The same command runs nothing; further batches and tokens are added; another rule is another sweep.
    assert "30 were there before, 0 finished" in command(capsys, *BATCHES)[2]
    further = [{"4:16": "4:32", "32,64": "32,64,128"}.get(word, word) for word in BATCHES]
    assert f"30 were there before, {4 * 3 * 5 - 30} finished" in command(capsys, *further)[2]
    status, _, err = command(capsys, *BATCHES[:-1], "sde")
    assert status == 2
    assert "fixed.horizon is 'sde+timescale' there and 'sde' here" in err


def test_the_rule_of_a_plan_beside_the_standard_belongs_to_the_sweep(tiny):
    """In whichever order they are named."""
    given = {
        **GOOD,
        "steps": None,
        "batches": [4, 8],
        "tokens": [32],
        "parameterization": ["standard", "plan"],
    }
    sweep("mine.py:tiny", **given, horizon="sde")
    with pytest.raises(UseError, match=r"fixed\.horizon is 'sde' there"):
        sweep("mine.py:tiny", **given)


def test_tokens_of_batches_are_those_of_the_steps_at_the_least_of_them(tiny):
    made = sweep(
        "mine.py:tiny", **GOOD | {"steps": 12, "parameterization": "plan"}, batches=[16, 4], warmup=4
    )
    assert {(row["batch"], row["planned_tokens"], row["steps"], row["warmup"]) for row in made.rows} == {
        (4, 48, 12, 4),
        (16, 48, 3, 1),  # as many tokens of warmup
    }
    assert made.base == th.Size(8, 1, 4, 48)


def test_each_is_varied_alone_without_product(tiny):
    given = {**GOOD, "steps": None, "parameterization": "plan", "widths": [8, 16], "batches": [4, 8]}
    made = sweep("mine.py:tiny", **given, tokens=[32, 64], horizon="sde")
    assert {curve.size for curve in made.families[0].curves} == {
        th.Size(8, 1, 4, 32),
        th.Size(16, 1, 4, 32),
        th.Size(8, 1, 8, 32),
        th.Size(8, 1, 4, 64),
    }
    named = [th.Size(8, 1, 4, 32), th.Size(8, 1, 8, 64)]
    made = sweep("mine.py:tiny", **{**GOOD, "steps": None}, sizes=named, out="named")
    assert [row["steps"] for row in made.rows] == [8] * 4


def test_smaller_batches_than_that_of_the_base_may_be_added_later(tiny):
    given = {**GOOD, "steps": None, "parameterization": "plan", "base": th.Size(8, 1, batch=8)}
    made = sweep("mine.py:tiny", **given, batches=[8, 16], tokens=[32])
    assert made.base == th.Size(8, 1, 8, 32)
    assert [row["steps"] for row in made.rows] == [4, 2]
    more = sweep("mine.py:tiny", **given, batches=[4, 8, 16], tokens=[32])
    assert (more.report.before, more.report.finished) == (2, 1)
    assert {row["batch"]: row["base_batch"] for row in more.rows} == {4: 8, 8: 8, 16: 8}


def test_the_own_optimizer_is_swept_over_batches_too(tiny):
    given = {**GOOD, "steps": None, "parameterization": ["own", "plan"], "horizon": "sde"}
    made = sweep("mine.py:tiny", **given, batches=[4, 8], tokens=[32])
    assert {(row["parameterization"], row["horizon"], row["batch"]) for row in made.rows} == {
        *[("own", "none", 4), ("own", "none", 8), ("plan", "sde", 4), ("plan", "sde", 8)]
    }
    assert all(math.isfinite(row["held_out"]) for row in made.rows)
    assert sweep("mine.py:tiny", **given, batches=[4, 8], tokens=[32]).report.before == 4


def test_a_search_over_sizes_with_tokens_makes_their_steps(tiny):
    pytest.importorskip("optuna")
    given = {**GOOD, "steps": None, "lr": [2**-9, 2**-3], "parameterization": "plan", "search": "tpe"}
    made = sweep("mine.py:tiny", **given, trials=3, batches=[4, 8], tokens=[32, 64])
    assert {(row["batch"], row["planned_tokens"], row["steps"]) for row in made.rows} == {
        (4, 32, 8),
        (8, 32, 4),
        (4, 64, 16),
    }


def test_the_tokens_of_a_workloads_own_size_count_unless_steps_are_given(tiny):
    sized = dataclasses.replace(th.workload("mine.py:tiny"), size=th.Size(8, 1, tokens=48))
    given = {**GOOD, "parameterization": "standard"}
    made = sweep(sized, **{**given, "steps": None}, out="own")
    assert {(row["steps"], row["planned_tokens"]) for row in made.rows} == {(6, 48)}
    made = sweep(sized, **given, out="steps")
    assert {(row["steps"], row.get("planned_tokens")) for row in made.rows} == {(4, None)}
    made = sweep(sized, **{**given, "steps": None}, batches=[4, 8], out="batches")
    assert {(row["batch"], row["steps"], row["planned_tokens"]) for row in made.rows} == {
        *[(4, 12, 48), (8, 6, 48)]
    }


BATCH, BOTH = th.Size(8, 1, batch=4), th.Size(8, 1, batch=4, tokens=32)


@pytest.mark.parametrize(
    "given, said",
    [
        ({"tokens": [32], "steps": 4}, "steps is given, and steps follow from the batch and the tokens"),
        ({"sizes": [BOTH], "steps": 4}, "steps is given, and steps follow"),
        ({"base": BOTH, "batches": [4, 8], "steps": 4}, "steps is given, and steps follow"),
        ({"tokens": [32], "axes": {"steps": [4, 8]}}, "steps is given, and steps follow"),
        ({"batches": [4], "axes": {"warmup": [0, 1]}}, "warmup is given, and steps follow"),
        ({"sizes": [BATCH], "batches": [4]}, "sizes and values of batch are both given"),
        ({"sizes": [BATCH, th.Size(16, 1)]}, "Size(width=16, depth=1) has no batch and other sizes have one"),
        ({"sizes": [BATCH], "base": BOTH}, "Size(width=8, depth=1, batch=4) has no tokens and other sizes"),
        ({"sizes": [th.Size(16, 1)], "base": BATCH}, "Size(width=16, depth=1) has no batch and other sizes"),
        ({"batches": [0]}, "batch is 0: give a positive whole number"),
        ({"tokens": [2.5]}, "tokens is 2.5: give a positive whole number"),
        ({"base": (8, 1)}, "base is (8, 1): give a Size, for example Size(256, 4)"),
        ({"horizon": "sdee"}, "horizon is 'sdee'. Did you mean 'sde'?"),
        ({"horizon": "sde", "parameterization": "plan", "axes": {"horizon": ["sde"]}}, "horizon is an axis"),
    ],
)
@pytest.mark.parametrize("parameterization", ["standard", "plan"])
def test_batches_and_tokens_that_do_not_fit_together_are_refused_before_any_run(
    tiny, given, said, parameterization
):
    if parameterization == "standard" and "horizon" in given:
        given = {**given, "parameterization": "plan"}
    with pytest.raises(UseError) as refused:
        sweep("mine.py:tiny", **{**GOOD, "steps": None, "parameterization": parameterization, **given})
    assert said in str(refused.value)
    assert {path.name for path in tiny.iterdir()} <= {"mine.py", "__pycache__"}


def test_the_command_refuses_steps_beside_tokens(tiny, capsys):
    status, _, err = command(capsys, "--lr", "2^-5", "--tokens", "32", "--steps", "4", "--engine", "serial")
    assert status == 2
    assert "steps is given, and steps follow from the batch and the tokens: leave it out" in err
