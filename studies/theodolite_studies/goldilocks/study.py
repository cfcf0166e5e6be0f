"""Is there a Goldilocks zone in inhomogeneous networks, and do they train there?

LeNet-300-100, LeNet-5 and ResNet-4 in five variants on Fashion-MNIST and CIFAR-10. Curvature is measured in
cells, training runs go to a ledger.

References:
    Revisiting the Goldilocks zone in inhomogeneous networks, 2025.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from theodolite.fleet.run import Run
from theodolite.fleet.training import Workloads
from theodolite_studies.framework.records import Record
from theodolite_studies.framework.study import Cell, FleetRuns, Row, Study
from theodolite_studies.goldilocks.curvature import (
    NetworkStart,
    course,
    logit_curve,
    scale_curves,
    temperature_curve,
)
from theodolite_studies.goldilocks.curves import Measured
from theodolite_studies.goldilocks.figures import figures
from theodolite_studies.goldilocks.setting import (
    COURSE_TEMPERATURES,
    FULL,
    NETWORKS,
    NORMED,
    PARTS,
    SMALL,
    TRAINED,
    GoldilocksSetting,
)
from theodolite_studies.goldilocks.tables import notes
from theodolite_studies.goldilocks.training import TRAINING_PARTS, map_cells, run_records, runs_of_a_map
from theodolite_studies.goldilocks.training_claims import TRAINING_CLAIMS
from theodolite_studies.goldilocks.zone_claims import ZONE_CLAIMS


def cells(setting: GoldilocksSetting) -> list[Cell]:
    """Part by part in the order of their worth; measurements by network, column and seed."""
    found: list[Cell] = []
    for part in PARTS:
        if part in TRAINING_PARTS:
            found.append({"part": part})
        for seed in setting.seeds if part not in TRAINING_PARTS else ():
            if part == "course":
                found += [
                    {"part": part, "network": network.name, "column": column, "seed": seed, "temperature": at}
                    for column, network in TRAINED.items()
                    for at in COURSE_TEMPERATURES
                ]
            else:
                found += [
                    {"part": part, "network": name, "column": column, "seed": seed}
                    for name in setting.networks
                    for column in NETWORKS[name].columns
                    if part == "zone" or column in NORMED
                ]
    return found


def run(cell: Cell, setting: GoldilocksSetting, device: str) -> Iterator[Record]:
    """The curves of a cell."""
    network, column, seed = NETWORKS[cell["network"]], cell["column"], cell["seed"]
    if cell["part"] == "course":
        yield course(network, column, cell["temperature"], seed, setting, device)
        return
    start = NetworkStart.made(network, column, seed, num=setting.batch, device=device)
    if cell["part"] == "logits":
        yield logit_curve(start, setting)
    else:
        yield {"row": "temperature", **temperature_curve(start, setting)}
        yield from ({"row": row, **found} for row, found in scale_curves(start, setting).items())


def runs(setting: GoldilocksSetting, part: str, rows: Sequence[Row]) -> list[Run]:
    """Those of a map's cells."""
    return [cell.run(setting) for cell in map_cells(part, setting)]


def workloads(setting: GoldilocksSetting) -> Workloads:
    """Of all networks that are trained, in all their variants."""
    found = [
        network.workload(column, images=setting.images, tested=setting.tested)
        for network in {network.name: network for network in TRAINED.values()}.values()
        for column in network.columns
    ]
    return {one.name: one for one in found}


STUDY = Study(
    "goldilocks",
    cells,
    run,
    (*ZONE_CLAIMS, *TRAINING_CLAIMS),
    figures,
    notes,
    data=Measured,
    full=FULL,
    small=SMALL,
    fleet=FleetRuns(
        runs,
        run_records,
        ("part", "network", "column", "row", "rule", "temperature", "seed", "at"),
        workloads,
        # One seed of a map at a time: large enough for a GPU, and what a kill can cost.
        chunk=lambda setting, part: runs_of_a_map(part, setting),
    ),
    restored=GoldilocksSetting.from_about,
)
