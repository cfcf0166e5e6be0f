"""A scaling law through your runs: what the loss will be, how to split a budget, and how sure that is.

    python examples/fit_scaling_law.py

Writes `runs.csv`, 49 runs of which the law is known (that of the Chinchilla points, with 0.3 % of noise),
fits it and prints what it finds, with the truth beside it. Put your own table in its place. It takes a few
seconds.
"""

import csv

import numpy as np

from theodolite import fits

TRUTH = {"A": 478.0, "B": 2143.0, "E": 1.817, "alpha": 0.347, "beta": 0.367}


def loss(parameters: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    of_size = TRUTH["A"] * parameters ** -TRUTH["alpha"]
    of_data = TRUTH["B"] * tokens ** -TRUTH["beta"]
    return TRUTH["E"] + of_size + of_data


def write_runs(path: str) -> None:
    parameters, tokens = map(np.ravel, np.meshgrid(np.geomspace(3e7, 3e9, 7), np.geomspace(1e9, 1e11, 7)))
    noise = np.exp(0.003 * np.random.default_rng(1).standard_normal(parameters.shape))
    with open(path, "w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["parameters", "tokens", "loss"])
        rows.writerows(zip(parameters, tokens, loss(parameters, tokens) * noise, strict=True))


if __name__ == "__main__":
    write_runs("runs.csv")
    fit = fits.fit("chinchilla", "runs.csv")
    for name, truth in TRUTH.items():
        print(f"{name:<6}{fit[name]}, in truth {truth}")

    split = fit.optimal(compute=1e23)
    print(f"\n1e23 FLOP: {split['parameters']} parameters on {split['tokens']} tokens")
    said = fit.predict(parameters=3e10, tokens=1e12)
    print(f"ten times as large: loss {said}, in truth {loss(3e10, 1e12):.4g}")
    fit.save("fit.html")
