"""`sweep`: train the runs of a grid or of a search, keep them in a ledger, and analyse them."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from theodolite.core.arguments import seeds as check_seeds
from theodolite.core.arguments import whole
from theodolite.core.errors import UseError
from theodolite.core.metric_names import OWN_DIGEST
from theodolite.core.progress import Progress
from theodolite.core.size import Size
from theodolite.fleet.driver import ProgressListener, RunListener, check_engine
from theodolite.fleet.engine import Resources
from theodolite.fleet.ledger import Ledger
from theodolite.fleet.opening import SUFFIXES, file_of
from theodolite.fleet.plans import check_plans, own_digest
from theodolite.fleet.run import OWN, Grid, Run, listed_size
from theodolite.fleet.training import conditions, workload_of
from theodolite.sweeping.curves import Criterion, scale_of
from theodolite.sweeping.making import Maker, Space, Stopped
from theodolite.sweeping.ranges import Range
from theodolite.sweeping.result import ALWAYS, Sweep, check_metric
from theodolite.workloads import Workload

USUAL_STEPS = 100
TIMING = ("steps", "warmup")
SHARED = ("wsd", "constant")
"""Schedules with which runs of several lengths begin alike."""
MOST_SEEDS = 10_000
"""More are taken for a typing error."""
FILES = (*SUFFIXES, ".html", ".json", ".csv", ".parquet")
"""Suffixes of files; the ledger's folder has none of them."""

Axis = Sequence[Any] | Range


def sweep(
    workload: Workload | str,
    *,
    lr: Axis | float,
    sizes: Iterable[Size] | None = None,
    widths: Sequence[int] = (),
    depths: Sequence[int] = (),
    batches: Sequence[int] = (),
    tokens: Sequence[int] = (),
    product: bool = False,
    base: Size | None = None,
    optimizer: str | Sequence[str] = "adamw",
    parameterization: str | Sequence[str] = ("plan", "standard"),
    seeds: int | Sequence[int] = 3,
    steps: int | None = None,
    warmup: int | None = None,
    axes: Mapping[str, Axis] | None = None,
    over: str = "lr",
    metric: str | None = None,
    search: Literal["tpe"] | None = None,
    trials: int = 20,
    out: str | Path = "sweep",
    engine: str = "auto",
    device: str = "cpu",
    jobs: int | None = None,
    chunk: int | None = None,
    address: str | None = None,
    per_run: Mapping[str, float] | None = None,
    timeout: float | None = None,
    progress: Progress | None = None,
    **fields: Any,
) -> Sweep:
    """Train a network at several sizes and learning rates; find the optimum at each size and how it moves.

    The runs are kept in the ledger `out/ledger.sqlite`. The same call again runs what is missing; a call with
    more sizes, learning rates, seeds, optimizers or values of an axis adds them. Anything else that differs
    makes it another sweep, which needs another folder.

    Args:
        workload: a `Workload`, or the name of one.
        lr: learning rates at base size.
        sizes: to train; or give `widths` and `depths`.
        widths: to train at the depth of the base.
        depths: to train at the width of the base.
        batches: numbers of examples in a step, to train the base with, for its number of tokens.
        tokens: numbers of targets to train the base on, with its batch; the steps follow from them.
        product: train all combinations of widths, depths, batches and tokens.
        base: the size that the plan starts from and optima are transferred from; the least of what is given,
            or the workload's own. It is always among the sizes. Its tokens are those of `steps` if only the
            batch is varied.
        optimizer: names in `theodolite.optimizers.OPTIMIZERS`.
        parameterization: `plan`, `standard`, `own` (the workload's own build and optimizer), or several.
            For `own`, lr stands for the default learning rate of that optimizer: all groups follow it.
        seeds: a number of seeds (0, 1, …), or the seeds.
        steps: of every run; 100 by default.
        warmup: steps at the base, and at other batches as many tokens; by default a tenth of all steps.
        axes: further fields of a run by name, with their values: `{"weight_decay": [0, 0.1]}`,
            `{"options.betas": [(0.9, 0.95), (0.9, 0.99)]}`.
        over: the quantity whose optimum is sought: `lr`, or one of the axes.
        metric: the metric of the workload by which runs are compared, instead of the held-out loss. Lower is
            better; infinite values count as those of runs that diverged.
        search: `tpe` searches the base size for the best learning rate and axes with Optuna, then tries half,
            once and twice that learning rate at every size. Axes may be a `Range`.
        trials: of the search.
        out: the folder of the ledger.
        engine: `auto`, `serial`, `processes`, `vectorised` or `ray`.
        device: `cpu`, `cuda` or `cuda:1`.
        jobs: processes at a time; by default the number of cores.
        chunk: most models in one program of the vectorised engine.
        address: of a Ray cluster.
        per_run: what one run takes of it, such as `{"GPU": 0.25}`.
        timeout: seconds that a run may take; one that takes longer has failed. The runs are then made in
            processes, which can be ended.
        progress: called with counts and the fraction done; `theodolite.present.bar.Bar()` draws a bar.
        fields: further fields of all runs, see `theodolite.fleet.run.Run`: `weight_decay`, `schedule`,
            `final`, `precision`, `held_out`, `every`, `probes`, `options`, `horizon`, …

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     made = sweep("mlp-mixture", widths=[16, 32], depths=[1], lr=[2**-8, 2**-6, 2**-4], seeds=2,
    ...                  parameterization="plan", steps=20, held_out=2, engine="serial", out=folder)
    >>> [str(optimum.size) for optimum in made.families[0].optima]
    ['16 × 1', '32 × 1']
    """
    if not isinstance(workload, Workload | str):
        raise UseError(f"the workload is {workload!r}: give a Workload, or a name such as 'gpt-sotu'")
    workloads = {} if isinstance(workload, str) else {workload.name: workload}
    name = workload if isinstance(workload, str) else workload.name
    found = workload_of(name, workloads)
    if not isinstance(base, Size | None):
        raise UseError(f"base is {base!r}: give a Size, for example Size(256, 4)")
    with conditions(name, workloads):
        own = usual_size(found, batches, tokens, steps)
        given = tokens or sizes is not None or (base is not None and base.tokens is not None)
        all_sizes, base = sizes_of(
            sizes, widths, depths, batches, tokens, product=product, base=base, own=own
        )
        of_size = timings(found, all_sizes, base, warmup, fields.get("schedule", Run.schedule))
    for argument in (["steps"] if steps is not None and given else []) + [*({*TIMING} & {*(axes or {})})]:
        if of_size:
            raise UseError(
                f"{argument} is given, and steps follow from the batch and the tokens: leave it out"
            )
    if axes and "lr" in axes:
        raise UseError("lr is among the axes: it is an argument of its own")
    swept = {"lr": [lr] if isinstance(lr, int | float) else lr, **(axes or {})}
    _check(swept, over, search, trials)
    criterion = Criterion.named(metric)
    check_metric(criterion, list(found.metrics), name)
    fixed = {"workload": name, "base": base, **_timing(steps, warmup, swept), **fields}
    kinds = {
        "optimizer": [optimizer] if isinstance(optimizer, str) else optimizer,
        "parameterization": [parameterization] if isinstance(parameterization, str) else parameterization,
        "seed": check_seeds("seeds", seeds, most=MOST_SEEDS),
    }
    strange = [name for name in kinds["optimizer"] if name not in ("adamw", OWN)]
    if strange and {*kinds["parameterization"]} == {OWN}:
        raise UseError(
            f"optimizer is {strange[0]!r}: with the own parameterization it is the workload's. Leave it out"
        )
    ranged = {key: _values(axis) for key, axis in swept.items()}
    grid = Grid({"size": all_sizes, **kinds, **ranged}, fixed, of_size)
    # Values that no run may have are refused here. Runs of `own` do not have all fields.
    most_fields = [(run.parameterization == OWN, run.parameterization == "standard") for run in grid.runs]
    first = grid.runs[most_fields.index(min(most_fields))]
    space = None if search is None else {**swept, "lr": _ends(swept["lr"])}
    scale_of(over, _values(swept[over]))
    spec = _spec(first, base, [*grid.axes], space)
    if of_size:  # these follow from the sizes, of which there may be more later
        spec["fixed"] = {key: value for key, value in spec["fixed"].items() if key not in TIMING}
        spec["warmup"] = warmup
    folder = Path(out).expanduser()
    if folder.is_file() or (folder.suffix.lower() in FILES and not folder.is_dir()):
        raise UseError(
            f"out is {out}, a file: it is the folder of the ledger and the page. Give one such as sweep"
        )
    folder = folder.absolute()  # workers on a cluster start in folders of their own
    resources = Resources(
        workloads=workloads,
        device=device,
        jobs=jobs or os.cpu_count() or 1,
        chunk=chunk,
        checkpoints=folder / "checkpoints",
        address=address,
        per_run=per_run or {},
        timeout=timeout,
    )
    check_engine(engine, resources)
    settled = _settled(folder)
    with conditions(name, workloads):
        _refuse_another_optimizer(folder, grid.runs, found)
        notes = check_plans([run for run in grid.runs if run.identity not in settled], found)
    listener = RunListener() if progress is None else ProgressListener(progress)
    with Ledger.open(folder, name=f"sweep of {name}", spec=spec) as ledger:
        for note in notes:
            listener.said(note)
        maker = Maker(ledger, engine, resources, listener)
        with suppress(Stopped):  # what is there is analysed
            if space is None:
                maker.make(grid.runs)
            else:
                maker.search(space, grid, base, trials, criterion)
        return Sweep.of(ledger.rows(), spec, over=over, metric=metric, report=maker.report)


def usual_size(workload: Workload, batches: Sequence[int], tokens: Sequence[int], steps: int | None) -> Size:
    """The workload's size; with its batch, and the tokens of some steps, where one of them is varied."""
    if not batches and not tokens:
        return workload.size if steps is None else dataclasses.replace(workload.size, tokens=None)
    batch = workload.size.batch or workload.usual_batch
    least = min((Size(1, 1, batch=each).batch or batch for each in batches), default=batch)
    seen = workload.tokens_in(USUAL_STEPS if steps is None else steps, least)
    if steps is None and workload.size.tokens is not None:
        seen = workload.size.tokens
    return workload.size.at(batch=batch, tokens=seen)


def timings(
    workload: Workload, sizes: Sequence[Size], base: Size, warmup: int | None, schedule: str
) -> dict[Size, dict[str, int]]:
    """The steps and the warmup of each size with a number of tokens; `warmup` is that of the base.

    By default it is a tenth of the steps; where runs of several lengths can share their beginning
    (`theodolite.fleet.trunks`), of those of the shortest.
    """
    steps = {size: workload.steps_for(size) for size in sizes if size.tokens is not None}
    shortest: dict[int | None, int] = {}
    for size, count in steps.items():
        shortest[size.batch] = min(count, shortest.get(size.batch, count))
    found = {}
    for size, count in steps.items():
        usual = (shortest[size.batch] if schedule in SHARED else count) // 10
        given = 0 if warmup is None else round(warmup * (base.batch or 1) / (size.batch or 1))
        found[size] = {"steps": count, "warmup": usual if warmup is None else given}
    return found


def sizes_of(
    sizes: Iterable[Size] | None,
    widths: Sequence[int],
    depths: Sequence[int],
    batches: Sequence[int] = (),
    tokens: Sequence[int] = (),
    *,
    own: Size,
    product: bool = False,
    base: Size | None = None,
) -> tuple[tuple[Size, ...], Size]:
    """All sizes, the base among them, and the base.

    By default the base is the least of each that is given, or the workload's own. Each is varied with the
    others as in the base, or all combinations are taken with `product`.

    >>> found, base = sizes_of(None, [128, 256], [4, 8], own=Size(64, 2))
    >>> [str(size) for size in found], str(base)
    (['128 × 4', '128 × 8', '256 × 4'], '128 × 4')
    >>> found, base = sizes_of(None, [], [], [16, 32], own=Size(64, 2, batch=32, tokens=10**6))
    >>> [str(size) for size in found], base.batch
    (['64 × 2, batch 16, 1M tokens', '64 × 2, batch 32, 1M tokens'], 16)
    """
    varied = {"width": widths, "depth": depths, "batch": batches, "tokens": tokens}
    if sizes is not None:
        if any(varied.values()):
            given = next(name for name, values in varied.items() if values)
            raise UseError(f"sizes and values of {given} are both given: give sizes, or what is varied alone")
        listed = list(sizes)
        if not listed:
            raise UseError("sizes is empty: give at least one Size, or leave it out")
        for size in listed:
            if not isinstance(size, Size):
                raise UseError(f"{size!r} is no size: give a Size, for example Size(256, 4)")
        chosen = base or min(listed)
        for name in ("batch", "tokens"):
            if len({getattr(size, name) is None for size in [*listed, chosen]}) > 1:
                without = next(size for size in [*listed, chosen] if getattr(size, name) is None)
                raise UseError(f"{without!r} has no {name} and other sizes have one: give all of them one")
        return tuple(sorted({*listed, chosen})), chosen
    least = {name: min(values, default=getattr(own, name)) for name, values in varied.items()}
    if base is not None:  # what it does not say is usual
        least |= {name: value for name, value in dataclasses.asdict(base).items() if value is not None}
    chosen = Size(**least)
    if product:
        among = [values or [getattr(chosen, name)] for name, values in varied.items()]
        found = {Size(*values) for values in itertools.product(*among)}
    else:
        found = {
            dataclasses.replace(chosen, **{name: value})
            for name, values in varied.items()
            for value in values
        }
    return tuple(sorted({*found, chosen})), chosen


def _check(swept: Mapping[str, Axis], over: str, search: str | None, trials: int) -> None:
    for name in swept:
        if name in (*ALWAYS, "base", "workload"):
            raise UseError(f"{name} cannot be one of the axes: it is an argument of its own")
    if over not in swept:
        raise UseError(f"over is {over!r}, which is no axis: give its values, as in axes={{{over!r}: […]}}")
    for name, axis in swept.items():
        if search is None and isinstance(axis, Range):
            raise UseError(
                f"{name} is a range from {axis.low:g} to {axis.high:g}: list values, or search='tpe'"
            )
    if search is None:
        return
    if search != "tpe":
        raise UseError(f"search is {search!r}: it is 'tpe', or None to try all values")
    if over != "lr":
        raise UseError(f"over is {over!r}: a search seeks the learning rate and all axes, so leave it out")
    whole("trials", trials, least=1)


def _timing(steps: int | None, warmup: int | None, swept: Mapping[str, Axis]) -> dict[str, int]:
    """Steps and warmup, unless they are axes. If one is given as both, the grid refuses it."""
    found = {}
    if steps is not None or "steps" not in swept:
        found["steps"] = USUAL_STEPS if steps is None else steps
    if warmup is not None:
        found["warmup"] = warmup
    elif "warmup" not in swept:
        if "steps" not in found:
            raise UseError(
                "steps is an axis, so a tenth of them is no warmup for all: give warmup, such as 0"
            )
        found["warmup"] = found["steps"] // 10
    return found


def _spec(run: Run, base: Size, axes: Sequence[str], space: Space | None) -> dict[str, Any]:
    """What all runs share, and the names of the axes, which may get further values later."""
    fixed = {key: value for key, value in run.to_dict().items() if key not in (*axes, "base", "workload")}
    for name in axes:
        top, dot, option = name.partition(".")
        if dot:
            del fixed[top][option]
    searched = {
        name: dataclasses.asdict(axis) if isinstance(axis, Range) else list(axis)
        for name, axis in (space or {}).items()
    }
    return {
        "study": "sweep",
        "workload": run.workload,
        "base": listed_size(base),
        "axes": sorted(axes),
        "fixed": fixed,
        "search": searched or None,
    }


def _values(axis: Axis) -> Sequence[Any]:
    """All values, or the ends of a range."""
    return [axis.low, axis.high] if isinstance(axis, Range) else axis


def _ends(axis: Axis) -> Range:
    """The range of learning rates for a search."""
    if isinstance(axis, Range):
        return axis
    if len({*axis}) < 2:
        raise UseError(f"lr is {list(axis)}: a search needs a lower and an upper end")
    return Range(min(axis), max(axis))


def _refuse_another_optimizer(folder: Path, runs: Sequence[Run], workload: Workload) -> None:
    """Refuse a folder whose `own` runs were made by an optimizer that the workload no longer has."""
    sizes = {run.size.network for run in runs if run.parameterization == OWN}
    if not sizes or workload.optimizer is None or not file_of(folder).is_file():
        return
    with Ledger.read(folder) as ledger:
        rows = [row for row in ledger.rows() if row["parameterization"] == OWN and row.get(OWN_DIGEST)]
    for size, digest in dict.fromkeys((Size(row["width"], row["depth"]), row[OWN_DIGEST]) for row in rows):
        if size in sizes and digest != own_digest(workload, size):
            raise UseError(
                f"the optimizer of {workload.name} at {size} differs from that of the own runs in {folder}. "
                "Undo the change to continue them, or give another folder for the new optimizer"
            )


def _settled(folder: Path) -> set[str]:
    """Identities of runs that have a result in the folder."""
    if not file_of(folder).is_file():
        return set()
    with Ledger.read(folder) as ledger:
        return ledger.settled()
