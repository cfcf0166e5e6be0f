"""A driver of eight gated runs, which prints the seed of each that ends: `gated_driver.py FOLDER`."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "fleet"))
import tiny

from theodolite.fleet.driver import RunListener, conduct
from theodolite.fleet.engine import Resources
from theodolite.fleet.ledger import Ledger
from theodolite.fleet.run import Outcome


class Told(RunListener):
    def ended(self, outcome: Outcome) -> None:
        print(outcome.run.seed, flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # some shells start programs deaf to it
    folder = Path(sys.argv[1])
    runs = [tiny.run("gated", seed, steps=40, optimizer="adamw") for seed in range(8)]
    resources = Resources(jobs=2, checkpoints=folder / "checkpoints", checkpoint_seconds=0)
    with Ledger.open(folder, name="gated", spec={}) as ledger:
        report = conduct(runs, ledger, engine="processes", resources=resources, listener=Told())
    print(report)
    sys.exit(130 if report.stopped else 0)
