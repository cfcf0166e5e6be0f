"""The launch sheet as text, page and JSON, of worlds in which the answers are known."""

from __future__ import annotations

import dataclasses
import json
import math
import re

import pytest
import torch

import theodolite as th
from theodolite.optimizers.horizon import Horizon

from .worlds import INPUTS, TARGET, TINY, World, in_world


def sheet_of(world, tmp_path_factory, **given):
    with pytest.MonkeyPatch.context() as patch:
        return in_world(world, tmp_path_factory.mktemp("sheet") / "scale", patch, **given)


@pytest.fixture(scope="module")
def clear(tmp_path_factory):
    """Everything is known."""
    return sheet_of(World(tokens=0.3), tmp_path_factory, tflops=1e-9)


@pytest.fixture(scope="module")
def doubtful(tmp_path_factory):
    """The seeds say next to nothing."""
    return sheet_of(World(noise=1.0), tmp_path_factory)


def headings(sheet):
    return re.findall(r"<h2>(.*?)</h2>", sheet.page())


def test_the_page_opens_with_the_verdict_and_the_key_figures(doubtful):
    page = doubtful.page()
    assert f"<h1>{doubtful.verdict}</h1>" in page
    assert page.index("<h1>") < page.index("held-out loss</td>") < page.index("<h2>")
    assert page.count(doubtful.verdict) == 2  # as the title of the window too
    assert headings(doubtful)[:4] == ["Risks", "Commands", "Forecast", "Plan"]
    for risk in doubtful.risks:
        assert page.index("Risks") < page.index(risk[:20], page.index("<h2>")) < page.index(">Commands<")


def test_a_sheet_without_risks_has_no_heading_for_them(clear):
    assert clear.risks == ()
    assert headings(clear)[0] == "Commands"


def test_powers_are_typeset_on_the_page_and_plain_in_the_text(clear):
    exponent = math.log2(clear.rate.base)
    assert f"2^{exponent:g} = " in str(clear)
    assert f"2<sup>−{-exponent:g}</sup> = " in clear.page()


def test_lines_to_copy_stand_in_blocks_of_their_own(clear):
    blocks = re.findall(r"<pre><code>(.*?)</code></pre>", clear.page(), re.S)
    assert len(blocks) == len(clear.commands) == 3
    python, *_, shell = clear.commands.values()
    compile(python, "sheet", "exec")
    assert shell.startswith("theodolite forecast check ")


def test_the_rate_of_the_target_is_the_rule_times_that_of_the_base(clear):
    rule = Horizon.of(clear.horizon)
    factor = (TARGET.tokens / clear.preparation.base.tokens) ** -rule.tokens
    assert f"learning rate, target  {clear.rate.base * factor:.3g}, known to ±" in str(clear)


def test_the_rate_of_the_target_is_that_of_the_plan_for_normalised_momentum_too(doubtful):
    """At four times the batch Muon's rate is not √4 times as large: its average gets shorter."""
    base = doubtful.preparation.base
    size = base.at(batch=4 * base.batch)
    plan = th.plan(
        TINY.build,
        torch.zeros(1, INPUTS),
        base=base,
        size=size,
        optimizer="muon",
        lr=0.25,
        horizon="sde",
    )
    sheet = dataclasses.replace(
        doubtful, plan=plan, horizon="sde", rate=dataclasses.replace(doubtful.rate, base=0.25)
    )
    (rate,) = {row.lr for row in plan.trained if row.rule == "muon"}
    assert rate > 0.25 * 2.1
    assert f"learning rate, target  {rate:.3g}" in str(sheet)


def test_hours_are_flop_over_speed(clear):
    hours = TARGET.tokens * (4 * 4 * 32 + 6 * (4 * 32**2 + 2 * 32)) / 1e3 / 3600
    assert clear.forecast.hours == pytest.approx(hours)
    days, rest = divmod(round(hours), 24)
    assert f"{days} d {rest} h at 1e-09 TFLOP/s" in str(clear)


def test_what_was_spent_is_told_as_a_share_of_the_target(clear):
    share = clear.spent / clear.preparation.target_flop
    assert f"{share:.1%} of the target's FLOP" in str(clear)


def test_the_json_has_all_of_it_and_no_number_that_json_does_not_know(doubtful):
    content = json.loads(doubtful.to_json(), parse_constant=pytest.fail)
    assert content["verdict"] == doubtful.verdict
    assert content["rate"]["octaves"] is None
    assert content["target"] == {"width": 32, "depth": 4, "batch": 8, "tokens": 32000}
    assert content["forecast"]["digest"] == doubtful.forecast.digest
    assert content["risks"] == list(doubtful.risks)
    assert content["plan"] == json.loads(json.dumps(doubtful.plan.to_dict()))
