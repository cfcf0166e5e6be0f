"""`examples/coded_training.py`: late workers and a killed one cost no step, and gradients are exact."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[1] / "examples" / "coded_training.py"
SETTINGS = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
    "OMP_NUM_THREADS": "1",
}


@pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install 'theodolite[ray]'"
)
def test_coded_workers_give_the_gradients_of_plain_training_and_lose_no_step(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", str(EXAMPLE)],
        cwd=tmp_path,
        env=environment | SETTINGS,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[:3] == [
        "24 steps of 4 models, 0 lost",
        "workers replaced: 1; answers that came too late: several",
        "gradients differ from those of plain training by less than 1e-06",
    ]
