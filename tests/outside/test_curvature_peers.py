"""Second derivatives as PyHessian, curvlinops and hessian-eigenthings have them, where those are right."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

import theodolite

HERE = Path(__file__).parent
PYTHON = HERE.parents[1] / ".venv-peers" / "bin" / "python"

pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="the peers' environment is missing: make peers")


@pytest.fixture(scope="module")
def found():
    """What each package is off by, measured in the peers' environment, where they cannot change our torch."""
    source = str(Path(theodolite.__file__).parents[1])
    done = subprocess.run(
        [PYTHON, HERE / "curvature_peers.py"],
        env=os.environ | {"PYTHONPATH": source},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", ["tanh", "rms norm", "layer norm", "batch norm, train", "group norm"])
def test_ours_is_right_through_every_norm(found, name):
    assert max(found["products"][name]["ours"].values()) < 1e-6


@pytest.mark.parametrize("peer", ["curvlinops", "pyhessian", "eigenthings"])
def test_every_peer_agrees_on_a_plain_network(found, peer):
    assert max(found["products"]["tanh"][peer].values()) < 1e-6


@pytest.mark.parametrize("name", ["rms norm", "layer norm", "group norm"])
def test_those_that_go_backward_twice_agree_through_norms(found, name):
    assert found["products"][name]["pyhessian"]["hessian"] < 1e-6
    assert max(found["products"][name]["eigenthings"].values()) < 1e-6


@pytest.mark.parametrize("name", ["rms norm", "layer norm", "group norm"])
def test_the_gauss_newton_matrix_of_curvlinops_agrees_through_norms(found, name):
    assert found["products"][name]["curvlinops"]["gauss_newton"] < 1e-6


def test_curvlinops_is_percents_off_through_layer_norm_and_ours_is_not(found):
    measured = found["products"]["layer norm"]
    assert 0.01 < measured["curvlinops"]["hessian"] < 1
    assert measured["ours"]["hessian"] < 1e-6


def test_curvlinops_has_no_hessian_through_group_norm_and_ours_has(found):
    measured = found["products"]["group norm"]
    assert "group_norm" in measured["curvlinops"]["hessian"]
    assert measured["ours"]["hessian"] < 1e-6


def test_pyhessian_measures_a_training_network_in_eval_mode_and_ours_as_it_is(found):
    measured = found["products"]["batch norm, train"]
    assert measured["pyhessian"]["hessian"] > 0.1
    assert measured["ours"]["hessian"] < 1e-6


# PyHessian divides by a norm plus 1e-6, twice.
@pytest.mark.parametrize(("peer", "close"), [("ours", 1e-8), ("eigenthings", 1e-8), ("pyhessian", 1e-5)])
def test_the_largest_eigenvalues_in_magnitude(found, peer, close):
    assert found["top"][peer] == pytest.approx(found["top"]["explicit"], rel=close)
