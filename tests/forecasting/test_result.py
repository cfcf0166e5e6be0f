"""What a forecast prints, and that an edited one is refused."""

import json
import re

import pytest

import theodolite as th
from theodolite import Size, UseError
from theodolite.forecasting import Forecast
from theodolite.present.text import number

from .worlds import BATCH, BEST, known_ledger


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    path = known_ledger(tmp_path_factory.mktemp("result") / "ledger", rates=(BEST,))
    return th.forecast(path, Size(128, 1, tokens=20_000 * BATCH), draws=40, tflops=1e-3)


@pytest.fixture
def path(made, tmp_path):
    return made.save(tmp_path / "forecast.json")


def edit(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False))


def test_it_says_the_loss_first(made):
    first = str(made).splitlines()[0]
    assert first.startswith("mlp-mixture at 128 × 1, 2.56M tokens, base learning rate 2^-6: held-out loss ")
    said = " ".join(str(made).split())
    assert f"{number(made.loss.value, 4)} ({number(made.loss.low, 4)} to {number(made.loss.high, 4)})" in said
    assert f"cost: {number(made.flop)} FLOP" in said
    assert f"sha256 {made.digest[:16]}" in said


def test_a_forecast_that_was_saved_says_the_same_when_it_is_loaded(made, path):
    again = Forecast.load(path)
    assert str(again) == str(made)
    assert again.digest == made.digest
    assert again.target == Size(128, 1, tokens=20_000 * BATCH)
    assert again.runs == made.runs


@pytest.mark.parametrize(
    "change, named",
    [
        (lambda content: content["loss"].update(low=0.1), "loss"),
        (lambda content: content.update(date="2020-01-01T00:00:00.000+00:00"), "date"),
        (lambda content: content["runs"].pop(), "runs"),
        (lambda content: content["runs"][0].update(identity="0" * 16), "runs"),
        (lambda content: content["target"].update(tokens=1), "target"),
        (lambda content: content.update(lr=0.5), "lr"),
        (lambda content: content["coverage"].update(factor=1.0001), "coverage"),
        (lambda content: content.pop("notes"), "notes"),
        (lambda content: content.update(extra=1), "extra"),
    ],
)
def test_what_was_edited_is_named(path, change, named):
    edit(path, change)
    with pytest.raises(UseError, match=rf"was edited after it was made: {named} does not match"):
        Forecast.load(path)


def test_a_field_that_was_edited_with_its_digest_is_still_refused(path):
    from theodolite.forecasting.result import digests_of

    def change(content):
        content["loss"]["low"] = 0.1
        fields = {name: value for name, value in content.items() if name != "kind"}
        content["digests"] = digests_of(fields)

    edit(path, change)
    with pytest.raises(UseError, match="its digest is another"):
        Forecast.load(path)


def test_a_file_without_digests_is_refused(path):
    edit(path, lambda content: content.pop("digest"))
    with pytest.raises(UseError, match="has no digests"):
        Forecast.load(path)


def test_its_hash_follows_from_its_content_and_nothing_else(made, path):
    import hashlib

    content = json.loads(path.read_text())
    fields = {name: content[name] for name in content if name not in ("kind", "digest", "digests")}
    text = json.dumps([fields, content["digests"]], sort_keys=True, separators=(",", ":"))
    assert hashlib.sha256(text.encode()).hexdigest() == made.digest
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:.]+\+00:00", content["date"])


def test_the_table_has_the_target_and_its_alternatives(made, tmp_path):
    lines = made.save(tmp_path / "forecast.csv").read_text().splitlines()
    assert lines[0] == ",parameters,tokens,loss,2.5 %,97.5 %"
    assert lines[1].split(",")[:4] == [
        "the target",
        str(made.parameters),
        str(made.tokens),
        repr(made.loss.value),
    ]
    assert len(lines) == 2 + len(made.alternatives)


def test_the_page_draws_every_run_and_the_target_with_its_interval(made, tmp_path):
    text = made.save(tmp_path / "forecast.html").read_text(encoding="utf-8")
    ((panel,),) = json.loads(re.search(r'id="figures">(.*?)</script>', text, re.S)[1])
    _, curve, points, target = panel["data"]
    assert len(points["x"]) == len(made.runs)
    assert target["x"] == [pytest.approx(made.flop, rel=1e-5)]
    assert target["y"][0] + target["error_y"]["array"][0] == pytest.approx(made.loss.high, rel=1e-5)
    assert target["y"][0] - target["error_y"]["arrayminus"][0] == pytest.approx(made.loss.low, rel=1e-5)
    assert curve["x"][-1] == pytest.approx(made.flop, rel=1e-5)
    assert curve["y"][-1] == pytest.approx(made.loss.value, rel=1e-5)
    assert panel["layout"]["xaxis"]["type"] == panel["layout"]["yaxis"]["type"] == "log"
