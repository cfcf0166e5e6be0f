"""From a workload to a launch sheet: once for real, by the command, and in worlds of known losses."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path

import pytest
import torch

import theodolite as th
from theodolite.cli import main
from theodolite.fleet import training
from theodolite.fleet.ledger import Ledger
from theodolite.launching import preparation
from theodolite.optimizers.horizon import Horizon

from .worlds import BASE, BATCH, TARGET, TINY, World, flop_per_token, hurried, in_world, scale

FILE = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from theodolite import Size, Workload
from tests.launching import worlds

def batch(seed, step):
    with Path("drawn").open("a") as file:
        file.write("1")
    return worlds.draw(seed, step)

def held_out(seed, step):
    return worlds.draw(9, step)

tiny = Workload("tiny", worlds.Net, batch, worlds.TINY.loss, Size(8, 1), held_out=held_out)
"""
ARGUMENTS = ["mine.py:tiny", "--to", "width=32,depth=4", "--base", "width=8,depth=1", "--engine", "serial"]
LEDGERS = {"rate", "transfer"}


def command(*arguments: str) -> int:
    """The exit status of `theodolite scale …`."""
    with pytest.raises(SystemExit) as left:
        main(["scale", *arguments])
    return left.value.code or 0  # type: ignore[return-value]


def rows_in(folder: Path) -> list[dict[str, object]]:
    """Of all ledgers."""
    found = []
    for path in sorted(folder.glob("*/ledger.sqlite")):
        with Ledger.read(path) as ledger:
            found += [{**row, "stage": path.parent.name} for row in ledger.rows()]
    return found


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with a real scale in it, and how many batches each of its runs was trained on."""
    folder = tmp_path_factory.mktemp("made")
    drawn = []

    def train(run, workload, **rest):
        before = Path("drawn").stat().st_size
        outcome = really(run, workload, **rest)
        drawn.append((run.size, Path("drawn").stat().st_size - before))
        return outcome

    really = training.train
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr("sys.path", [*__import__("sys").path])
        hurried(patch)
        patch.setattr(training, "train", train)
        (folder / "mine.py").write_text(FILE)
        assert command(*ARGUMENTS, "--budget", "10%") == 0
    return folder, drawn


@pytest.fixture
def again(made, tmp_path, monkeypatch):
    """A copy of that folder, to be gone on with; nothing may be trained there."""
    shutil.copytree(made[0], tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    hurried(monkeypatch)
    monkeypatch.setattr(training, "train", None)
    return tmp_path


def test_all_files_are_in_the_folder(made):
    names = {path.name for path in (made[0] / "scale").iterdir()}
    pages = {"survey.html", "rate.html", "transfer.html", "law.html", "launch.html"}
    data = {"survey.json", "forecast.json", "plan.json", "plan.csv", "plan_torch.py", "launch.json"}
    (law,) = names - pages - data - LEDGERS
    assert law.startswith("law-")
    assert names >= pages | data | LEDGERS


def test_no_more_is_trained_than_the_budget_allows(made):
    folder, drawn = made
    spent = sum(count * BATCH * flop_per_token(size.width, size.depth) for size, count in drawn)
    target = 4000 * BATCH * flop_per_token(32, 4)
    sheet = json.loads((folder / "scale" / "launch.json").read_text())
    assert sheet["preparation"]["target_flop"] == target
    assert spent <= 0.1 * target
    # And what the sheet says was spent is what was: only a run that diverges ends before.
    assert sheet["spent"] == pytest.approx(spent, rel=0.02)


def test_each_question_has_the_runs_that_were_announced(made):
    folder, _ = made
    sheet = json.loads((folder / "scale" / "launch.json").read_text())
    rows = rows_in(folder / "scale")
    for stage in sheet["preparation"]["stages"]:
        there = [row for row in rows if str(row["stage"]).startswith(stage["name"])]
        added = 0
        if stage["name"] == "rate":
            added = len({row["lr"] for row in there}) - stage["num_rates"]
        assert len(there) == stage["runs"] + added * stage["seeds"] * len(stage["sizes"])


def test_the_plan_is_that_of_the_sheets_numbers(made):
    folder, _ = made
    sheet = json.loads((folder / "scale" / "launch.json").read_text())
    plan = th.plan(
        TINY.build,
        TINY.draw(0, 0)[0],
        base=BASE.at(batch=BATCH, tokens=sheet["preparation"]["base"]["tokens"]),
        size=TARGET.at(batch=BATCH),
        lr=sheet["rate"]["base"],
        horizon=sheet["horizon"],
    )
    saved = json.loads((folder / "scale" / "plan.json").read_text())
    assert {**saved, "kind": ""} == {**json.loads(plan.to_json()), "kind": ""}
    assert (folder / "scale" / "plan_torch.py").read_text() == plan.export("torch").text


def test_the_commands_of_the_sheet_make_the_target_and_check_its_forecast(again, capsys, monkeypatch):
    monkeypatch.undo()  # trains
    monkeypatch.chdir(again)
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    sheet = json.loads((again / "scale" / "launch.json").read_text())
    own_loop, here, check = sheet["commands"].values()
    names: dict[str, object] = {}
    exec(own_loop, names)
    assert [weight.shape for weight in names["model"].parameters()][1] == (32, 32)
    rates = {group["lr"] for group in names["optimizer"].param_groups}
    steps = [names["scheduler"].lr_lambdas[0](step) for step in range(4000)]
    base_steps = sheet["preparation"]["base"]["tokens"] // BATCH
    assert steps.index(1.0) == base_steps // 10 - 1  # the warmup of the small runs, in their tokens
    assert steps[3199] == 1.0 > steps[3201]  # decays over the last fifth
    # A run of the target in no time: its loss is what was forecast.
    told = th.Forecast.load("scale/forecast.json")
    world = World()
    monkeypatch.setattr(World, "loss", lambda world, run: told.loss.value)
    monkeypatch.setattr(training, "train", world.train)
    exec(here.replace("seeds=1", "seeds=1,\n    engine='serial'"), {})
    with pytest.raises(SystemExit) as left:
        main(check.split()[1:])
    assert not left.value.code
    assert "Inside: mine.py:tiny at 32 × 4" in capsys.readouterr().out
    with Ledger.read("scale/target") as ledger:
        (row,) = [row for row in ledger.rows() if row["width"] == 32]
    assert row["lr"] == sheet["rate"]["base"]
    assert row["steps"] == 4000
    assert len(rates) > 1


def test_the_same_command_runs_nothing_and_the_forecast_keeps_its_date(again, capsys):
    before = {path: path.read_text() for path in (again / "scale").glob("*.json")}
    assert command(*ARGUMENTS, "--budget", "10%", "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["kind"] == "theodolite launch sheet"
    assert printed["forecast"]["digest"] == th.Forecast.load("scale/forecast.json").digest
    for path in before.keys() - {again / "scale" / "launch.json"}:
        assert path.read_text() == before[path]


def test_th_scale_finds_in_the_folder_what_the_command_left_and_leaves_random_numbers_alone(again):
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    sheet = th.scale("mine.py:tiny", th.Size(32, 4), base=BASE, budget=0.1, engine="serial")
    assert torch.equal(torch.random.get_rng_state(), before)
    kept = json.loads((again / "scale" / "launch.json").read_text())
    assert sheet.rate.base == kept["rate"]["base"]
    assert sheet.verdict == kept["verdict"]


def test_a_fail_of_the_survey_forbids_the_launch(again):
    path = again / "scale" / "survey.json"
    content = json.loads(path.read_text())
    content["findings"][0] |= {"level": "fail", "code": "TH105", "title": "Nothing grows"}
    path.write_text(json.dumps(content))
    sheet = th.scale("mine.py:tiny", th.Size(32, 4), base=BASE, budget=0.1, engine="serial")
    assert sheet.verdict == "Do not launch tiny at 32 × 4, batch 8, 32k tokens: nothing grows (TH105)."


def test_another_target_in_the_folder_is_not_given_the_forecast_of_this_one(tmp_path, monkeypatch):
    longer = th.Size(32, 4, tokens=4000 * BATCH)
    deeper = th.Size(32, 8, tokens=4000 * BATCH)
    first = in_world(World(), tmp_path, monkeypatch, longer, budget=1.0)
    monkeypatch.undo()
    second = in_world(World(), tmp_path, monkeypatch, deeper, budget=1.0)
    assert second.preparation.base == first.preparation.base  # so that the runs are the same
    assert second.forecast.runs == first.forecast.runs
    assert (first.forecast.target.depth, second.forecast.target.depth) == (4, 8)


class Stopping(World):
    """Counts its runs, and is stopped before one of them."""

    def train(self, run, workload, **rest):
        if len(RUNS) == STOP[0]:
            STOP[0] = math.inf
            raise KeyboardInterrupt
        RUNS.append(run.identity)
        return super().train(run, workload, **rest)


RUNS: list[str] = []
STOP: list[float] = []


@pytest.mark.parametrize("after", [0, 50, 100, 140], ids=["rate, first", "rate", "transfer", "law"])
def test_it_goes_on_after_ctrl_c(tmp_path, monkeypatch, after):
    whole = sum(stage.runs for stage in preparation_of_worlds(monkeypatch).stages)
    RUNS[:], STOP[:] = [], [after]
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        in_world(Stopping(), tmp_path, patch)
    assert not (tmp_path / "launch.json").exists()
    assert len(RUNS) == after < whole
    with monkeypatch.context() as patch:
        in_world(Stopping(), tmp_path, patch)
    assert len(RUNS) == whole
    assert (tmp_path / "launch.json").exists()


def preparation_of_worlds(monkeypatch):
    with monkeypatch.context() as patch:
        hurried(patch)
        return preparation.prepare(TINY, TARGET, budget=0.2, base=BASE, rates=scale.RATES)


def test_exponents_that_are_known_are_planned_by(tmp_path, monkeypatch):
    sheet = in_world(World(tokens=0.3), tmp_path, monkeypatch)
    base = sheet.preparation.base.tokens
    best = -6 - 0.3 * math.log2(base / 64)
    assert math.log2(sheet.rate.base) == pytest.approx(best, abs=0.25)
    assert (4 * math.log2(sheet.rate.base)).is_integer()
    rule = Horizon.of(sheet.horizon)
    assert (rule.rates, rule.batch, rule.timescale) == ("power", 0.0, False)
    assert rule.tokens == pytest.approx(0.3, abs=0.05)
    # A tensor whose rate does not go with width or depth.
    gone = -rule.tokens * math.log2(TARGET.tokens / base)
    assert sheet.plan["embed.weight"].lr == pytest.approx(sheet.rate.base * 2**gone)
    assert f"{sheet.rate.base * 2**gone:.3g}, known to ±" in str(sheet)
    assert sheet.rate.octaves < 0.5
    assert "sde" not in str(sheet)


def test_the_forecast_is_the_worlds(tmp_path, monkeypatch):
    sheet = in_world(World(tokens=0.3), tmp_path, monkeypatch)
    truth = 1.5 + 20 * (4 * 32 + 4 * 32**2 + 2 * 32) ** -0.4 + 30 * TARGET.tokens**-0.5
    assert sheet.forecast.loss.value == pytest.approx(truth, rel=0.01)
    assert sheet.forecast.loss.low * 0.99 < truth < sheet.forecast.loss.high * 1.01
    assert sheet.moved < 0.5
    assert sheet.risks == ()
    assert sheet.verdict.startswith("tiny at 32 × 4, batch 8, 32k tokens can be launched. The held-out loss")


def test_exponents_lost_in_noise_are_not_planned_by_and_the_sheet_says_so(tmp_path, monkeypatch):
    sheet = in_world(World(noise=1.0), tmp_path, monkeypatch)
    assert sheet.horizon == "sde"
    assert not math.isfinite(sheet.rate.octaves)
    assert any("the plan takes the rule sde, which is derived and not measured" in one for one in sheet.risks)
    assert "can be launched with care: read the risks" in sheet.verdict
    factor = math.sqrt(sheet.preparation.base.tokens / TARGET.tokens)
    assert sheet.plan["embed.weight"].lr == pytest.approx(sheet.rate.base * factor)


def test_a_larger_batch_is_swept_and_its_exponent_is_planned_by(tmp_path, monkeypatch):
    target = TARGET.at(batch=32, tokens=16_000 * BATCH)
    sheet = in_world(World(tokens=0.3, batch=0.5), tmp_path, monkeypatch, target)
    assert {row["batch"] for row in rows_in(tmp_path) if row["stage"] == "rate"} == {8, 16, 32}
    rule = Horizon.of(sheet.horizon)
    assert (rule.tokens, rule.batch) == pytest.approx((0.3, 0.5), abs=0.05)
    assert "The forecast is made from runs with a batch of 8, and the target has 32." in sheet.risks


def test_weight_decay_keeps_its_timescale(tmp_path, monkeypatch):
    sheet = in_world(World(), tmp_path, monkeypatch, weight_decay=0.1)
    assert Horizon.of(sheet.horizon).timescale
    base, embed = sheet.preparation.base, sheet.plan["embed.weight"]
    # The average over 1/(lr·decay) steps is the same share of training.
    steps = TARGET.tokens / base.tokens
    assert embed.lr * embed.weight_decay == pytest.approx(sheet.rate.base * 0.1 / steps)


def test_learning_rates_are_added_at_the_end_where_the_best_lies_within_the_budget(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        sheet = in_world(World(best=-2.0, tokens=0.0), tmp_path, patch, budget=0.6)
    rates = sorted({math.log2(row["lr"]) for row in rows_in(tmp_path) if row["stage"] == "rate"})
    assert rates == [*range(-9, 0)] or rates == [*range(-9, -1)]
    assert math.log2(sheet.rate.base) == pytest.approx(-2.0, abs=0.25)
    todo = sheet.preparation
    per_rate = todo.stage("rate").flop / 6
    assert sheet.spent == pytest.approx(todo.flop + (len(rates) - 6) * per_rate)
    assert sheet.spent <= 0.6 * todo.target_flop
    # Called again it knows these rates.
    ended = [row["ended"] for row in rows_in(tmp_path)]
    again = in_world(World(diverges=True), tmp_path, monkeypatch, budget=0.6)
    assert [row["ended"] for row in rows_in(tmp_path)] == ended
    assert (again.rate, again.spent) == (sheet.rate, sheet.spent)


def test_added_learning_rates_are_completed_after_ctrl_c(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        whole = in_world(World(best=-2.0, tokens=0.0), tmp_path / "whole", patch, budget=0.6)
    RUNS[:], STOP[:] = [], [whole.preparation.stage("rate").runs + 1]
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        in_world(Stopping(best=-2.0, tokens=0.0), tmp_path / "stopped", patch, budget=0.6)
    with monkeypatch.context() as patch:
        sheet = in_world(World(best=-2.0, tokens=0.0), tmp_path / "stopped", patch, budget=0.6)
    seeds = sheet.preparation.stage("rate").seeds
    tried = [row["lr"] for row in rows_in(tmp_path / "stopped") if row["stage"] == "rate"]
    assert {tried.count(rate) for rate in tried} == {seeds * len(sheet.preparation.stage("rate").sizes)}
    assert sheet.rate.base == whole.rate.base


def test_where_the_budget_ends_before_the_best_rate_is_found_the_sheet_says_so(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        hurried(patch)
        exact = preparation.prepare(TINY, TARGET, budget=0.2, base=BASE, rates=scale.RATES)
    least = 1.0001 * (exact.flop + exact.further(2)) / exact.target_flop
    sheet = in_world(World(best=3.0, tokens=0.0), tmp_path, monkeypatch, budget=least)
    assert len({row["lr"] for row in rows_in(tmp_path) if row["stage"] == "rate"}) == 8
    assert any("is not known: it is the last that was tried" in one for one in sheet.risks)


def test_a_best_rate_that_moves_to_larger_networks_is_a_risk(tmp_path, monkeypatch):
    sheet = in_world(World(moves=-0.6), tmp_path, monkeypatch)
    assert sheet.moved == pytest.approx(0.6, abs=0.1)
    (risk,) = [one for one in sheet.risks if "a plan allows" in one]
    assert re.search(r"moves by 0\.\d\d octaves over 8 × 1, 8 × 2, 16 × 1: more than the 0\.5", risk)


def test_without_a_law_there_is_no_forecast_and_no_crash(tmp_path, monkeypatch):
    # Two networks alone fit between the base and the target: too few for a law of size and tokens.
    sheet = in_world(World(), tmp_path, monkeypatch, th.Size(16, 1, tokens=8000 * BATCH), budget=1.0)
    assert sheet.forecast is None
    assert "There is no forecast of the loss." in sheet.risks
    assert "There is none: " in str(sheet)
    assert "cannot tell a law" in sheet.unforeseen
    assert not (tmp_path / "forecast.json").exists()
    assert json.loads((tmp_path / "launch.json").read_text())["forecast"] is None
    assert not any("forecast check" in lines for lines in sheet.commands.values())


def test_a_loss_that_nothing_lowers_is_forecast_to_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(World, "loss", lambda world, run: 2.0 + 0.01 * (math.log2(run.lr) + 6) ** 2)
    sheet = in_world(World(), tmp_path, monkeypatch)
    assert sheet.forecast.loss.value == pytest.approx(2.0, rel=1e-3)


def test_where_all_diverges_smaller_learning_rates_are_asked_for(tmp_path, monkeypatch):
    with pytest.raises(th.UseError, match=r"no learning rate tried at 8 × 1.* give smaller ones"):
        in_world(World(diverges=True), tmp_path, monkeypatch)


def test_a_dry_run_says_what_would_be_run_and_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "140")
    assert command("mlp-mixture", "--to", "width=256,depth=2", "--budget", "10%", "--dry-run") == 0
    printed = capsys.readouterr()
    assert "does it hold for larger networks" in printed.err
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--to", "width"], "--to width: write NAME=N"),
        (["--to", "height=3"], "--to height=3: a size has width, depth, batch, tokens, and no height"),
        (["--to", "width=2.5"], "--to width 2.5: give a positive whole number"),
        (["--budget", "much"], "--budget much: write a percentage"),
        (["--budget", "3"], "--budget 3: write a percentage up to 100%, for example --budget 3%"),
        (["--budget", "-1%"], "--budget -1%"),
        (["--budget", "nan"], "--budget nan"),
        (["--base", "wide=3"], "--base wide=3"),
        (["--base", "width=64,depth=2"], "the base is 64 × 2 and the target 32 × 4"),
        (
            ["--base", "width=8,batch=2"],
            "base is 8 × 1, batch 2: its batch and tokens follow from the budget",
        ),
        (["--lr", "fast"], "--lr fast"),
        (["--lr", "2^-5:2^-4"], "give 3 learning rates or more, as 2^-10:2^-4"),
        (["--schedule", "wds"], "schedule is 'wds'"),
        (["--optimizer", "adamv"], "optimizer is 'adamv'"),
        (["--weight-decay", "-1"], "weight_decay is -1"),
        (["--tflops", "0"], "tflops is 0"),
        (["--engine", "fast"], "engine is 'fast'"),
    ],
)
def test_an_option_that_cannot_be_used_is_named_and_nothing_is_written(
    tmp_path, monkeypatch, capsys, arguments, said
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    (tmp_path / "mine.py").write_text(FILE)
    usual = [*ARGUMENTS, "--budget", "50%"]
    given = [word for word in usual if word != arguments[0]]
    at = usual.index(arguments[0]) if arguments[0] in usual else None
    if at is not None:
        given = [*usual[:at], *usual[at + 2 :]]
    assert command(*given, *arguments) == 2
    printed = capsys.readouterr()
    assert said in printed.err.splitlines()[-1]
    assert printed.out == ""
    assert not (tmp_path / "scale").exists()


def test_another_budget_in_the_same_folder_is_refused(again, capsys):
    assert command(*ARGUMENTS, "--budget", "20%") == 2
    assert "out" in capsys.readouterr().err.splitlines()[-1]
