"""Runs on a cluster of two nodes, one of which is killed, then on one of our own: `… FOLDER NOTES`.

Writes `found.json` into the folder, in which `mine.py` and `neighbour.py` lie.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import psutil  # Ray's own
import ray
import tiny
from ray.cluster_utils import Cluster

import theodolite as th
from theodolite.fleet.engine import Resources
from theodolite.fleet.ray_tasks import ray_tasks
from theodolite.fleet.run import Outcome, Run

folder, notes = Path(sys.argv[1]), Path(sys.argv[2])
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
doomed = cluster.add_node(num_cpus=1)


def kill_a_node() -> None:
    # when each node is in the middle of a run
    while sum(len(file.read_text().splitlines()) > 5 for file in notes.glob("worker *")) < 2:
        time.sleep(0.01)
    cluster.remove_node(doomed, allow_graceful=False)


def begun(run: Run) -> None:
    if run.workload.endswith("mine.py:workload"):  # nobody may look it up after it was sent
        (folder / "mine.py").unlink(missing_ok=True)
        (folder / "neighbour.py").unlink(missing_ok=True)


def plain(outcome: Outcome) -> dict[str, Any]:
    return {**dataclasses.asdict(outcome), "run": outcome.run.to_dict()}


factor, mixture = 3.0, th.workload("mlp-mixture")
given = dataclasses.replace(
    mixture,
    loss=lambda logits, targets: factor * mixture.loss(logits, targets),
    metrics={"three": lambda model: factor, "never": th.workloads.StepsTo("accuracy", at_least=1.5)},
)
runs = [tiny.run("slow", seed, steps=60) for seed in range(3)]
runs += [tiny.run("faulty", seed) for seed in (2, 3, 4)]
for name in ("given", "unknown there", f"{folder}/mine.py:workload"):
    runs.append(dataclasses.replace(tiny.run(), workload=name))
runs.append(tiny.own_run())
resources = Resources(
    {"given": given, "unknown there": tiny.plain}, jobs=1, address=cluster.address, begun=begun
)
threading.Thread(target=kill_a_node, daemon=True).start()
found: dict[str, Any] = {"cluster": [plain(outcome) for outcome in ray_tasks(runs, resources)], "local": []}
assert not ray.is_initialized()
cluster.shutdown()
del os.environ["RAY_AUTH_MODE"]
for outcome in ray_tasks([tiny.run()], Resources(jobs=1)):
    me = psutil.Process()
    sockets = [each for one in (me, *me.children(recursive=True)) for each in one.net_connections("inet")]
    found["listening"] = sorted({each.laddr.ip for each in sockets if each.status == "LISTEN"})
    found["token"] = os.environ.get("RAY_AUTH_MODE")
    found["local"].append(plain(outcome))
assert not ray.is_initialized()
(folder / "found.json").write_text(json.dumps(found))
