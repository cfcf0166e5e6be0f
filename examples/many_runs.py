"""A question of your own as a grid of runs: does it matter how large a network starts?

    python examples/many_runs.py

Trains a small network with five initial scales, three learning rates and two seeds, writes every run to
`many_runs/ledger.sqlite` as it ends, and prints a table. Give the command again and nothing is trained twice;
add a value to an axis and only that is trained. It takes a few seconds, and needs pandas
(`pip install 'theodolite[frame]'`).
"""

import math

import theodolite as th
from theodolite import fleet
from theodolite.present.bar import Bar

GRID = fleet.Grid(
    axes={"init_scale": [0.01, 0.1, 0.5, 1.0, 4.0], "lr": [0.003, 0.03, 0.3], "seed": range(2)},
    fixed={
        "workload": "mlp-mixture",  # or yours: "path/to/file.py:name"
        "size": th.Size(width=32, depth=4),
        "parameterization": "standard",
        "optimizer": "sgd",
        "options": {"momentum": 0.9},
        "steps": 25,
        "warmup": 3,
    },
)

if __name__ == "__main__":  # other processes import this file
    with fleet.Ledger.open("many_runs", name="initial scale", spec={"steps": 25}) as ledger:
        report = fleet.conduct(GRID.runs, ledger, progress=Bar())
        frame = ledger.frame()

    print(report, end="\n\n")
    frame = frame.fillna({"held_out": math.inf})  # a seed that diverged has no loss
    print(frame.pivot_table(index="init_scale", columns="lr", values="held_out").round(2).to_string())
