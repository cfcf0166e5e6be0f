"""Forecasts against the runs of their target."""

import json
import math
import sys

import pytest

import theodolite as th
from theodolite import Size, UseError
from theodolite.cli import main
from theodolite.forecasting import check
from theodolite.forecasting import forecast as making

from .worlds import BATCH, BEST, known_ledger, outcome, planned, standard, surface, write

STEPS = 20_000
LONG_AGO, FAR_AHEAD = "2000-01-01T00:00:00.000+00:00", "2999-01-01T00:00:00.000+00:00"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return known_ledger(tmp_path_factory.mktemp("checking") / "ledger", rates=(BEST,))


def made_at(runs, date, monkeypatch):
    monkeypatch.setattr(sys.modules[making.__module__], "now", lambda: date)
    return making(runs, Size(128, 1, tokens=STEPS * BATCH), draws=40)


@pytest.fixture
def made(runs, monkeypatch):
    return made_at(runs, LONG_AGO, monkeypatch)


def target(seed=0, loss=None, ended="finished", **fields):
    run = planned(128, STEPS, seed=seed, **fields)
    return outcome(run, surface(41_000, STEPS * BATCH) if loss is None else loss, ended=ended)


def test_a_run_of_the_known_law_is_inside(made, tmp_path):
    found = check(made, write(tmp_path / "target", [target(seed) for seed in (0, 1)]))
    assert found.inside
    assert [run.inside for run in found.runs] == [True, True]
    assert found.actual == pytest.approx(surface(41_000, STEPS * BATCH))
    assert found.error == pytest.approx(made.loss.value / found.actual - 1)
    assert str(found).startswith("Inside: mlp-mixture at 128 × 1, 2.56M tokens came out at ")
    assert f"{found.error:+.2%} off" in " ".join(str(found).split())


def test_another_loss_is_outside_by_the_mean_of_its_seeds(made, tmp_path):
    far = 1.5 * made.loss.high
    found = check(made, write(tmp_path / "target", [target(0), target(1, loss=far)]))
    assert [run.inside for run in found.runs] == [True, False]
    assert not found.inside
    assert str(found).startswith("Outside")
    near = check(made, write(tmp_path / "edge", [target(0, loss=made.loss.high * (1 - 1e-9))]))
    beyond = check(made, write(tmp_path / "beyond", [target(0, loss=made.loss.high * (1 + 1e-9))]))
    assert (near.inside, beyond.inside) == (True, False)


def test_a_target_that_diverged_is_outside(made, tmp_path):
    found = check(made, write(tmp_path / "target", [target(0), target(1, ended="diverged")]))
    assert not found.inside
    assert math.isnan(found.actual)
    assert "diverged" in found.verdict


def test_only_runs_of_the_target_count(made, tmp_path):
    others = [
        outcome(planned(128, STEPS // 2), 9.0),
        outcome(planned(64, STEPS), 9.0),
        outcome(planned(128, STEPS, lr=2**-5), 9.0),
        outcome(standard(128, STEPS), 9.0),
        target(3, loss=9.0, weight_decay=0.1),
        target(4, loss=9.0, base=Size(16, 1)),
        target(5, ended="failed"),
    ]
    found = check(made, write(tmp_path / "target", [*others, target(0)]))
    assert [run.seed for run in found.runs] == [0]
    with pytest.raises(UseError, match=r"no settled run of 128 × 1.*2\^-6.*Run it, then check again"):
        check(made, write(tmp_path / "others", others))


def test_a_forecast_that_was_made_after_its_run_foretold_nothing(runs, monkeypatch, tmp_path):
    late = made_at(runs, FAR_AHEAD, monkeypatch)
    path = write(tmp_path / "target", [target(0)])
    with pytest.raises(UseError, match=r"ended before the forecast of 2999.*Forecast before you run"):
        check(late, path)


def test_runs_from_before_do_not_count_and_are_said(runs, monkeypatch, tmp_path):
    from theodolite.fleet.ledger import Ledger

    path = write(tmp_path / "target", [target(0), target(1)])
    first, second = sorted(row["ended"] for row in Ledger.read(path).rows())
    if first == second:
        pytest.skip("both ended in the same millisecond")
    found = check(made_at(runs, first, monkeypatch), path)
    assert len(found.runs) == 1
    assert found.notes == ("1 run of the target ended before the forecast: not counted.",)


def test_a_forecast_of_a_ledger_can_be_checked_in_the_same_ledger(made, runs, tmp_path):
    import shutil

    from theodolite.fleet.ledger import Ledger

    copy = shutil.copytree(runs, tmp_path / "copy")
    with Ledger.open(copy, name="known", spec={}) as ledger:
        ledger.append(target(0))
    assert check(made, copy).inside


def command(*arguments, capsys):
    with pytest.raises(SystemExit) as left:
        main(["forecast", *map(str, arguments)])
    told = capsys.readouterr()
    return left.value.code or 0, told.out, told.err


def test_the_command_forecasts_writes_and_checks(runs, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sys.modules[making.__module__], "now", lambda: LONG_AGO)
    file = tmp_path / "forecast.json"
    asked = ["--width", 128, "--depth", 1, "--tokens", "2.56e6", "--draws", 40, "--tflops", "0.001"]
    code, text, said = command(runs, *asked, "--out", file, capsys=capsys)
    assert (code, file.exists()) == (0, True)
    assert "mlp-mixture at 128 × 1, 2.56M tokens" in text
    assert f"Written to {file}" in said
    inside, outside = write(tmp_path / "in", [target(0)]), write(tmp_path / "out", [target(0, loss=9.0)])
    code, text, _ = command("check", file, inside, capsys=capsys)
    assert code == 0
    assert text.startswith("Inside")
    code, text, _ = command("check", file, outside, capsys=capsys)
    assert code == 1
    assert text.startswith("Outside")
    code, text, _ = command("check", file, outside, "--json", capsys=capsys)
    told = json.loads(text)
    assert (code, told["inside"], told["actual"]) == (1, False, 9.0)
    file.write_text(file.read_text().replace('"date": "2000', '"date": "1999'))
    code, _, said = command("check", file, inside, capsys=capsys)
    assert code == 2
    assert "edited after it was made: date does not match" in said


def test_make_may_be_named_and_left_out(runs, capsys):
    asked = [runs, "--width", 128, "--depth", 1, "--tokens", "2.56e6", "--draws", 40, "--json"]
    (code, named, _), (_, short, _) = command("make", *asked, capsys=capsys), command(*asked, capsys=capsys)
    assert code == 0
    assert json.loads(named)["loss"] == json.loads(short)["loss"]


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--help"], ["check", "make", "theodolite forecast sweep --width 512"]),
        (["check", "--help"], ["FORECAST", "LEDGER", "Exits with 0"]),
        (["make", "--help"], ["--tokens", "--tflops", "--out"]),
    ],
)
def test_help_names_what_there_is(arguments, words, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    code, text, _ = command(*arguments, capsys=capsys)
    assert code == 0
    assert all(word in text for word in words)


def test_the_public_name_is_the_function():
    assert th.forecast is making
