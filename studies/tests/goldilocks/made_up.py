"""Records of the Goldilocks study that were made up."""

import math

import numpy as np

from theodolite_studies.goldilocks.setting import NETWORKS, TRAINED, GoldilocksSetting
from theodolite_studies.goldilocks.study import STUDY

SETTING = GoldilocksSetting(points=7)


SEEDS = (0, 1, 2)


JITTER = 1e-3


def bump(at, centre=0.0, peak=3.0, width=1.0):
    return peak * np.exp(-(((np.asarray(at) - centre) / width) ** 2))


def zone_record(network, column, row, at, excess, seed, **others):
    t = excess * 1.5
    share = (excess + 4) / 12
    values = {
        "excess": excess + JITTER * seed,
        "t": t,
        "excess of S": excess - 0.1,
        "trace of S": 0 * excess,
        "trace of S error": 0 * excess + 1.0,
        "frobenius of G": share / (1 - share),
        "frobenius of S": 0 * excess + 1.0,
        **others,
    }
    return {
        "part": "zone",
        "network": network,
        "column": column,
        "row": row,
        "seed": seed,
        "at": list(at),
        **{name: list(np.asarray(value, dtype=float)) for name, value in values.items()},
    }


def as_the_paper_says():
    """Records of the LeNet on Fashion-MNIST and of the ResNet, in which every claim holds."""
    records = []
    alphas = np.array(SETTING.alphas())
    for name in ("lenet300-fashion", "resnet4-fashion"):
        network = NETWORKS[name]
        temperatures = np.array(SETTING.temperatures(network))
        for column in network.columns:
            normed = column in ("D", "E")
            peak = 1.0 if normed else 3.0
            along = bump(temperatures, centre=0.5, peak=peak, width=2.0)
            alpha = along[::-1].copy()
            joint = np.full(7, peak)
            others = {"trace of S": np.full(7, -9.0)} if normed else {}
            if normed:
                along[0] = alpha[-1] = -2.0
            if column in ("B", "C", "E"):
                joint = np.where(alphas < 0, 0.1, peak)
                if column != "E":
                    alpha = bump(alphas * network.layers - 3, peak=peak, width=2.0)
            if column == "C":
                joint[:2] = (0.0, 2.0)
            for seed in SEEDS:
                rows = {"alpha": alpha, "temperature": along, "joint": joint}
                if column in ("C", "E"):
                    rows["identity"] = np.full(7, peak)
                for row, excess in rows.items():
                    at = temperatures if row == "temperature" else alphas
                    t = excess / math.sqrt(50) * math.sqrt(51) / np.sqrt(1 - excess**2 / 50)
                    records.append(zone_record(name, column, row, at, excess, seed, t=t, **others))
                if normed:
                    records.append(
                        {
                            "part": "logits",
                            "network": name,
                            "column": column,
                            "seed": seed,
                            "at": list(alphas),
                            "kl": [1.0, 1.0, 1e-6, 0.0, 0.0, 0.0, 0.0],
                            "error": [0.9, 0.5, 1e-3, 0.0, 0.0, 0.0, 0.0],
                        }
                    )
    return records


def claimed(records, start):
    (found,) = [claim for claim in STUDY.decide(records, SETTING) if claim.statement == start]
    return found


TS = (-9.0, -4.0, -1.0, 0.0, 1.0, 2.0, 4.0, 9.0)


def maps(part, column, train, *, rule="temperature", seed=0, at=TS, test=None):
    """`train(T)` at the better of two rates; the other diverges."""
    return [
        {
            "part": part,
            "network": TRAINED[column].name,
            "column": column,
            "rule": rule,
            "at": place,
            "seed": seed,
            "rates": [-2.0, -1.0],
            "train": [train(place), None],
            "test": [(test or train)(place), None],
        }
        for place in at
    ]


def with_zones(trained):
    """The records with zones from T = 0.1 to 10."""
    found = list(trained)
    for column, network in TRAINED.items():
        for seed in SEEDS:
            excess = np.array([0.0, 0.0, 2.0, 2.0, 2.0, 0.0, 0.0])
            at = (-9, -1.01, -1, 0, 1, 1.01, 9)
            found.append(zone_record(network.name, column, "temperature", at, excess, seed))
    return found


def falling(place):
    return 0.9 if abs(place) <= 1 else 0.9 - 0.1 * abs(place) / 2


def course_record(column, at, excess, share, seed):
    return {
        "part": "course",
        "network": TRAINED[column].name,
        "column": column,
        "temperature": at,
        "seed": seed,
        "at": [0, 10, 100],
        "excess": list(excess),
        "frobenius of G": list(share),
        "frobenius of S": [1.0, 1.0, 1.0],
        "train": [0.1, 0.5, 0.9],
    }
