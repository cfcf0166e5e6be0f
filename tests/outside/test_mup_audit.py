"""Audits of networks with microsoft/mup: what its code makes right passes, and what is left out is found."""

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

OPTIMIZERS = "MuAdamW", "MuAdam", "MuSGD"
ROOT = pytest.approx(10**0.5, rel=0.01)
HIDDEN = {
    "MLP": {"hidden.*.weight"},
    "Transformer": {f"blocks.*.{name}.weight" for name in ("qkv", "out", "up", "down")},
    "tied": {f"blocks.*.{name}.weight" for name in ("qkv", "out", "up", "down")},
}


@pytest.fixture(scope="module")
def found():
    """Audits in the peers' environment, and the numbers in the forward passes."""
    source = str(Path(theodolite.__file__).parents[1])
    done = subprocess.run(
        [PYTHON, HERE / "mup_audit.py"],
        env=os.environ | {"PYTHONPATH": source},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def mistakes(found, network: str, optimizer: str) -> list[tuple[str, float, set[str]]]:
    """Of each finding: its code, times too large at ten times the width, and its tensors."""
    said = []
    for finding in found["audits"][f"{network} | {optimizer}"]["findings"]:
        evidence = finding["evidence"]
        (times,) = evidence["numbers"].values()
        said.append((finding["code"], times, {row["tensor"] for row in evidence["rows"]}))
    return said


def test_the_multiplier_of_a_mu_readout_is_seen(found):
    # Four times the base width: mup divides the readout's input by four.
    factors = found["factors"]
    for network in ("MLP", "Transformer"):
        assert factors[network] == {"readout.weight": [0.25, 1.0]}
        assert factors[f"{network}, readout of torch"] == {}
    assert factors["tied"] == {"tokens.weight": [1.0, 0.25]}  # as the table, as the readout


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("network", HIDDEN)
def test_what_mup_makes_right_passes(found, network, optimizer):
    assert mistakes(found, network, optimizer) == []
    assert found["audits"][f"{network} | {optimizer}"]["right"]


@pytest.mark.parametrize("network", HIDDEN)
def test_training_agrees(found, network):
    said = " ".join(found["audits"][f"{network} | MuAdamW"]["trained"])
    assert "keep their size" in said
    assert "disagree" not in said


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("network", ["MLP", "Transformer"])
def test_a_readout_of_torch_is_found(found, network, optimizer):
    expected = [("TH209", 10.0, {"readout.weight"})]
    assert mistakes(found, f"{network}, readout of torch", optimizer) == expected


@pytest.mark.parametrize("network", HIDDEN)
def test_adamw_of_torch_is_found(found, network):
    assert mistakes(found, network, "AdamW") == [("TH206", 10.0, HIDDEN[network])]


@pytest.mark.parametrize("network", HIDDEN)
def test_sgd_of_torch_is_found(found, network):
    # For SGD mup raises the learning rate of everything with one side that grows, and of nothing else.
    ((code, times, tensors),) = mistakes(found, network, "SGD")
    assert (code, times) == ("TH206", 0.1)
    assert not tensors & HIDDEN[network]
    readout = "tokens.weight" if network == "tied" else "readout.weight"
    assert {readout} <= tensors
    assert "readout.bias" not in tensors


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_shared_readout_leaves_the_table_growing(found, optimizer):
    # microsoft/mup, issue 55: set_base_shapes multiplies the shared weight by the root of the width, as it
    # does a readout, whose initial values fall with the width; those of an embedding do not.
    expected = [("TH207", ROOT, {"tokens.weight"})]
    assert mistakes(found, "tied, as it is built", optimizer) == expected
