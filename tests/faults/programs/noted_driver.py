"""A driver of runs whose workers note what they draw: `noted_driver.py FOLDER SEEDS STEPS`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "fleet"))
import tiny

from theodolite.fleet.driver import conduct
from theodolite.fleet.engine import Resources
from theodolite.fleet.ledger import Ledger

if __name__ == "__main__":
    folder, seeds, steps = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    runs = [tiny.run("noted", seed, steps=steps, optimizer="adamw") for seed in range(seeds)]
    resources = Resources(jobs=2, checkpoints=folder / "checkpoints", checkpoint_seconds=0)
    with Ledger.open(folder, name="noted", spec={}) as ledger:
        conduct(runs, ledger, engine="processes", resources=resources)
