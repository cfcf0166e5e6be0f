"""The exponents of the envelope."""

import math

import numpy as np
import pytest

from theodolite_studies.growing import envelope as fits
from theodolite_studies.growing.claims import claims
from theodolite_studies.growing.envelope import envelope
from theodolite_studies.growing.report import notes

from .tiny import grown_records


def test_the_exponents_of_a_known_recursion_are_found():
    found = envelope(grown_records())
    assert found.s.value == pytest.approx(2, abs=0.1)
    assert found.foretold.value == pytest.approx(1 / 3, rel=0.1)
    assert found.measured.value == pytest.approx(1 / 3, rel=0.05)
    assert found.coupling == pytest.approx(2, abs=0.15)
    assert found.alone.s.value < 1.1
    assert envelope([one for one in grown_records() if one["depth"] < 4]) is None


def falling_records(grown, alone, noise=0.001):
    """Losses by stage, three seeds."""
    random = np.random.default_rng(0)
    return [
        {
            "part": "envelope",
            "kind": kind,
            "seed": seed,
            "depth": k if kind == "grown" else 1,
            "steps": 100 * k,
            "loss": 1 + law(k) + noise * random.normal(),
            "gain": 0.1,
            "parameters": 1,
        }
        for kind, law in (("grown", grown), ("alone", alone))
        for seed in range(3)
        for k in range(1, 9)
    ]


def power_law(k):
    return 1 / k


def exponential(k):
    return 0.7**k


@pytest.mark.parametrize(
    ("grown", "alone", "verdict"),
    [
        (power_law, exponential, "holds"),
        (power_law, power_law, "unclear"),  # steps alone do the same
        (exponential, exponential, "unclear"),
    ],
)
def test_a_power_law_of_depth_is_one_that_neither_an_exponential_nor_time_explains(grown, alone, verdict):
    records = falling_records(grown, alone)
    (found,) = [one for one in claims(records) if one.statement == "each block takes a power of what is left"]
    assert found.verdict == verdict
    assert f"of one block for the same steps {envelope(records).alone.s}" in found.here
    assert "may be training time" in notes(records)


def test_held_out_errors_are_of_stages_that_the_fits_have_not_seen():
    stage, unseen = np.arange(1.0, 9), np.where(np.arange(1, 9) > 6, 1.1, 1.0)
    for law, limit, other in ((exponential, True, 0.0), (power_law, True, 0.03), (power_law, False, 0.0)):
        loss = 1 + law(stage)
        assert fits._error(stage, loss, exponential=limit) == pytest.approx(other, abs=0.01)
    # What is not seen changes errors, and not what is foretold.
    bent = fits._error(stage, (1 + exponential(stage)) * unseen, exponential=True)
    assert bent == pytest.approx(math.log(1.1), abs=1e-3)
