"""Claims about depth expansion on records whose verdict is known."""

import math

import numpy as np
import pytest

from theodolite_studies.depth_expansion.claims import LEVEL
from theodolite_studies.depth_expansion.study import STUDY
from theodolite_studies.framework.claims import Observation, at_most

from .made_up import made_up


def _verdicts(records):
    return {claim.statement.removeprefix("augmented: "): claim.verdict for claim in STUDY.decide(records)}


def test_every_claim_holds_in_a_world_as_the_paper_has_it():
    found = _verdicts(made_up())
    assert len(found) == 21
    assert {name: verdict for name, verdict in found.items() if verdict != "holds"} == {}


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("channels' gradients are nearly uncorrelated", {"near": lambda n, w: 0.5}),
        ("so are those of single entries of maps", {"near": lambda n, w: 0.5}),
        ("what correlation there is is noise", {"beyond": lambda n, w: 0.5}),
        ("C does not depend on width", {"top": lambda n, w: 0.2}),
        ("the train gradient's norm falls with depth", {"train": lambda n, w: 0.1 * w}),
        ("the test gradient's norm falls with depth", {"test": lambda n, w: 0.1 * w}),
        ("most of the train gradient's fall comes early", {"train": lambda n, w: w * math.exp(-n)}),
        ("wider networks keep a larger train gradient", {"train": lambda n, w: 0.1 / w / n}),
        (
            "at equal train loss the train gradient still falls with depth",
            {"loss": lambda n, w: 1 + 9 / n / w, "train": lambda n, w: (1 + 9 / n / w) ** 4 * n**0.3},
        ),
        (
            "in units of one image's spread the test gradient falls with depth",
            {"trace": lambda n, w: n**-2.0},
        ),
        ("one more block would gain less in a deeper network", {"gain": lambda n, w: n}),
        ("the test loss falls with width at every depth", {"risk": lambda n, w: 0.01 * w + 1 / n}),
        ("and flattens", {"risk": lambda n, w: 1 - 0.02 * w}),
        ("the test loss falls with depth at first", {"risk": lambda n, w: 0.1 * n + 1 / w}),
        ("and rebounds", {"risk": lambda n, w: 0.1 / n + 1 / w}),
        (
            "the best depth grows with width",
            {"risk": lambda n, w: 0.5 + 1 / w + 0.1 * abs(math.log2(n / 2))},
        ),
        ("two test samples align as often as the bound has it", {"bound": lambda n, w, size: 0.01 / size}),
        ("so do a train and a test sample", {"bound": lambda n, w, size: 0.01 / size}),
        (
            "train and test samples fail to align less often the larger they are",
            {"failing": lambda n, w, size: 1e-4 * size / w},
        ),
        ("and the wider the network", {"failing": lambda n, w, size: 1e-2 * w / size}),
        ("‖μ‖²/λ_max, on which the bound rests, grows with width", {"test": lambda n, w: 0.2 / w / n}),
    ],
)
def test_a_claim_fails_where_it_is_not_so(name, change):
    assert _verdicts(made_up(**change))[name] == "fails"


def test_a_claim_at_its_threshold_errs_as_often_as_it_may():
    """Three seeds: Student's t, and all cases together, where two standard errors fail in two of three."""
    random = np.random.default_rng(0)

    def verdicts(mean, cases):
        decide = at_most(0, lambda draws: [Observation("", values) for values in draws], level=LEVEL)
        return [decide(random.normal(mean, size=(cases, 3)))[1] for _ in range(300)]

    assert verdicts(0.0, 1).count("holds") < 25
    assert verdicts(0.0, 12).count("fails") < 25
    assert verdicts(-20.0, 12).count("holds") > 290
    assert verdicts(20.0, 12).count("fails") > 290


def test_a_best_depth_at_the_edge_is_not_known():
    found = _verdicts(made_up(risk=lambda n, w: 0.5 + 1 / w + 0.1 / n))
    assert found["the best depth grows with width"] == "unclear"
