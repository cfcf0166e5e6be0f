"""A metric cannot take the name of anything else that a row of a ledger has."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from theodolite import Size
from theodolite.core.metric_names import is_free, metrics_in
from theodolite.fleet.engine import Resources, serial
from theodolite.fleet.ledger import Ledger
from theodolite.fleet.run import PROBES, Run


def test_in_rows_nothing_but_the_metrics_counts_as_one(tmp_path: Path) -> None:
    run = Run(
        "mlp-mixture",
        Size(8, 1),
        0.1,
        "muon-kimi",
        base=Size(8, 1),
        steps=2,
        held_out=1,
        probes=PROBES,
        evaluate_every=1,
        options={"momentum": 0.9},
        vector_options={"betas": (0.9, 0.95)},
    )
    (outcome,) = serial([run], Resources())
    assert outcome.status == "finished", outcome.error
    judged = dataclasses.replace(outcome, readings={**outcome.readings, "solver iterations": 17.0})
    with Ledger.open(tmp_path, name="first", spec={}) as ledger:
        ledger.append(dataclasses.replace(outcome, run=dataclasses.replace(run, seed=1)))
        assert metrics_in(ledger.rows()) == []
        ledger.append(judged)
        assert metrics_in(ledger.rows()) == ["solver iterations"]


@pytest.mark.parametrize("field", dataclasses.fields(Run), ids=lambda field: field.name)
def test_no_field_of_a_run_is_a_name_for_a_metric(field: dataclasses.Field[object]) -> None:
    assert not is_free(field.name)
