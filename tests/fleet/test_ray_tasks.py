"""Ray: the numbers of one run after the other, on a cluster that loses workers and a node."""

from __future__ import annotations

import dataclasses
import fcntl
import importlib.util
import json
import math
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from theodolite import UseError
from theodolite.fleet.engine import Resources, serial
from theodolite.fleet.ray_tasks import ray_tasks

from . import tiny

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install 'theodolite[ray]'"
)

SCRIPT = Path(__file__).parent / "programs" / "ray_clusters.py"
MINE = """
import neighbour
import theodolite as th
from torch import nn

def build(width, depth):
    return neighbour.build(width, depth)

workload = th.Workload("mine", build, neighbour.batch, nn.functional.cross_entropy)
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What two nodes gave, one of which was killed, and then a cluster of our own.

    Made once, by whichever process of the tests comes first: it takes long, and Ray finds other clusters.
    """
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    folder = folder / "ray"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "found.json").exists():
            _run_on_clusters(folder)
    found = json.loads((folder / "found.json").read_text())
    files = (folder / "notes").glob("worker *")
    pairs = [tuple(map(int, line.split())) for file in files for line in file.read_text().splitlines()]
    return {**found, "drawn": Counter(pairs), "folder": folder}


def _run_on_clusters(folder: Path) -> None:
    (folder / "notes").mkdir()
    (folder / "mine.py").write_text(MINE)
    (folder / "neighbour.py").write_text(tiny.FILE.read_text())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINY_FOLDER", str(folder / "notes"))
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_health_check_period_ms", "300")  # it takes ten seconds to miss a node otherwise
        patch.setenv("RAY_worker_niceness", "0")  # they would starve beside tests that are not nice
        patch.delenv("RAY_ADDRESS", raising=False)
        command = [sys.executable, "-W", "ignore", str(SCRIPT), str(folder), str(folder / "notes")]
        ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=900)
    assert ended.returncode == 0, ended.stderr


def of(found: dict[str, Any], workload: str, seed: int = 0) -> dict[str, Any]:
    (outcome,) = (
        outcome
        for outcome in found["cluster"]
        if outcome["run"]["workload"].endswith(workload) and outcome["run"]["seed"] == seed
    )
    return outcome


def same(found: dict[str, Any], alone) -> bool:
    one = (found["status"], found["step"], found["held_out"], found["metrics"], found["readings"])
    return json.loads(json.dumps(one)) == json.loads(json.dumps(tiny.numbers(alone)))


@needs_ray
def test_a_run_on_a_node_that_is_killed_is_made_on_another(found: dict[str, Any]) -> None:
    for alone in serial([tiny.run("slow", seed, steps=60) for seed in range(3)], Resources()):
        assert alone.status == "finished"
        assert same(of(found, ":slow", alone.run.seed), alone)
    assert any(found["drawn"][seed, step] > 1 for seed in range(3) for step in range(1, 60))


@needs_ray
def test_a_cluster_of_its_own_cannot_be_reached_from_elsewhere(found: dict[str, Any]) -> None:
    assert found["listening"]
    assert {address.removeprefix("::ffff:") for address in found["listening"]} == {"127.0.0.1"}
    assert found["token"] == "token"


@needs_ray
def test_a_killed_worker_costs_two_retries_and_then_the_run(found: dict[str, Any]) -> None:
    lost = of(found, ":faulty", 2)
    assert lost["status"] == "failed"
    assert lost["error"].startswith("its Ray worker was lost 3 times: ")
    assert len((found["folder"] / "notes" / "killed 2").read_text().split()) >= 3


@needs_ray
def test_divergence_and_exceptions_come_back_as_outcomes(found: dict[str, Any]) -> None:
    diverged, failed = of(found, ":faulty", 3), of(found, ":faulty", 4)
    assert (diverged["status"], diverged["step"]) == ("diverged", 5)
    assert failed["status"] == "failed"
    assert failed["error"].endswith("ArithmeticError: the fourth seed is bad\n")


@needs_ray
def test_workloads_are_sent_with_their_code(found: dict[str, Any]) -> None:
    (mixture,) = serial([dataclasses.replace(tiny.run(), workload="mlp-mixture")], Resources())
    tripled = of(found, "given")
    assert tripled["metrics"]["loss"][0][1] == pytest.approx(3 * mixture.metrics["loss"][0][1])
    (alone,) = serial([tiny.run()], Resources())
    assert (tripled["readings"]["three"], tripled["readings"]["never"]) == (3.0, math.inf)
    mine = of(found, "mine.py:workload")  # its file, and the one beside it, were gone by then
    assert mine["status"] == "finished", mine["error"]
    assert mine["metrics"]["loss"] == [list(pair) for pair in alone.metrics["loss"]]


@needs_ray
def test_an_optimizer_of_the_workload_is_made_on_the_node(found: dict[str, Any]) -> None:
    (alone,) = serial([tiny.own_run()], Resources())
    assert same(of(found, ":authored"), alone)


@needs_ray
def test_a_workload_that_a_node_cannot_import_is_named(found: dict[str, Any]) -> None:
    outcome = of(found, "unknown there")
    assert outcome["status"] == "failed"
    assert "workload 'unknown there' did not arrive" in outcome["error"]
    assert "No module named 'tiny'. Install what it imports there, or give" in outcome["error"]


@needs_ray
def test_without_a_cluster_there_is_one_for_as_long_as_the_runs_take(found: dict[str, Any]) -> None:
    (alone,) = serial([tiny.run()], Resources())
    (local,) = found["local"]
    assert same(local, alone)
    assert local["engine"] == "ray"


def test_without_ray_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UseError, match=r"pip install 'theodolite\[ray\]'"):
        next(ray_tasks([tiny.run()], Resources()))
