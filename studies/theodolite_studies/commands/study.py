"""`theodolite study`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from theodolite_studies.commands.running_study import RECORDS, Draw, carry_out, drawn


def study_coordinates(
    out: Annotated[
        Path, typer.Option(help="The records, one line of JSON for each run; figures go beside it.")
    ] = Path("coordinates.jsonl"),
    jobs: Annotated[int, typer.Option(min=1, help="Processes, one thread each.")] = 1,
    device: Annotated[str, typer.Option(help="cpu, or cuda, which the processes share.")] = "cpu",
    network: Annotated[
        list[str] | None, typer.Option(help="One of the study's networks alone; may be repeated.")
    ] = None,
    optimizer: Annotated[
        list[str] | None, typer.Option(help="adamw or muon-kimi alone; may be repeated.")
    ] = None,
    small: Annotated[bool, typer.Option("--small", help="Widths up to 192 and depths up to 8.")] = False,
    draw: Annotated[bool, typer.Option("--draw", help="Run nothing: draw what the file holds.")] = False,
) -> None:
    """Do stream, branches and logits keep their size from width 64 to 1024 and from depth 2 to 32?

    Runs what the file of records does not hold yet, so that it goes on where it was stopped; then prints the
    claims and draws the figures from the file.

    [bold]Examples[/bold]

      theodolite study coordinates --small --network gpt-pre --optimizer adamw

      theodolite study coordinates --jobs 14 --device cuda

      theodolite study coordinates --out docs/studies/coordinates.jsonl --draw
    """
    from theodolite.core.building import check_device
    from theodolite_studies.coordinates import report as reporting
    from theodolite_studies.coordinates.study import FULL, OPTIMIZERS, SMALL, conduct
    from theodolite_studies.framework.networks import NETWORKS

    if not draw:
        check_device(device)
        conduct(
            out,
            grid=SMALL if small else FULL,
            networks=network or tuple(NETWORKS),
            optimizers=optimizer or OPTIMIZERS,
            jobs=jobs,
            device=device,
            tell=lambda line: print(line, file=sys.stderr, flush=True),
        )
    print(drawn(reporting.report, out) if draw else reporting.report(out))


def study_transfer(
    out: Annotated[Path, typer.Option(help="The folder of the ledger; figures go there too.")] = Path(
        "transfer"
    ),
    part: Annotated[
        list[str] | None,
        typer.Option(
            help="adamw, muon-kimi, adamw-bare (no norms), muon-kimi-bare, sgd, lion or muon alone; may be "
            "repeated."
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:1.")] = "cpu",
    engine: Annotated[str, typer.Option(help="auto, serial, processes, vectorised or ray.")] = "auto",
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Processes at a time; as many as there are cores.")
    ] = None,
    small: Annotated[
        bool, typer.Option("--small", help="Widths 64 and 128, depths to 32, the built-in text: for a CPU.")
    ] = False,
    summary: Annotated[
        Path | None, typer.Option(help="Write the runs as a small CSV file, which --draw can read.")
    ] = None,
    draw: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Run nothing: draw what a summary or a folder holds.")
    ] = None,
) -> None:
    """Does the best learning rate stay from width 128 to 1024 and from depth 2 to 64, on enwik8?

    Runs what the ledger does not hold yet, part by part in the order of their worth, so that it can be
    stopped and goes on where it was; then prints the claims and draws the figures.

    Exits with 1 if a run failed, with 130 after Ctrl-C.

    [bold]Examples[/bold]

      theodolite study transfer --device cuda --part adamw --part muon-kimi

      theodolite study transfer --small --part adamw-bare

      theodolite study transfer --draw docs/studies/transfer.csv
    """
    from theodolite_studies.transfer.report import report

    if draw is not None:
        print(drawn(report, draw))
        return
    import dataclasses

    from theodolite.fleet.driver import check_engine
    from theodolite.fleet.engine import Resources
    from theodolite.present.bar import Bar
    from theodolite_studies.transfer.study import FULL, SMALL, make, write_summary

    means = Resources(device=device)
    check_engine(engine, means)
    if jobs is not None:
        means = dataclasses.replace(means, jobs=jobs)
    made = make(
        out,
        setting=SMALL if small else FULL,
        parts=part or (),
        engine=engine,
        means=means,
        progress=Bar(),
        tell=lambda line: print(line, file=sys.stderr, flush=True),
    )
    print(report(out))
    if summary is not None:
        write_summary(out, summary)
    if made is not None and not made.ok:
        raise typer.Exit(130 if made.stopped else 1)


def study_goldilocks(
    out: Annotated[Path, typer.Option(help="The folder of records and ledger; figures go there too.")] = Path(
        "goldilocks"
    ),
    part: Annotated[
        list[str] | None,
        typer.Option(
            help="zone, logits, temperature, scale, adam, course or neighbours alone; may be repeated."
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:1.")] = "cpu",
    engine: Annotated[str, typer.Option(help="auto, serial, processes, vectorised or ray.")] = "auto",
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Processes at a time; as many as there are cores.")
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, max=1000, help="How many; 3, or 2 of the small study.")
    ] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Steps of full-batch training.")] = None,
    images: Annotated[int | None, typer.Option(min=1, help="Images that are trained on.")] = None,
    precision: Annotated[
        str | None, typer.Option(help="Of training: tf32 or float32; curvature is in float64.")
    ] = None,
    small: Annotated[
        bool,
        typer.Option("--small", help="Two networks, 13 points, 500 images, 100 epochs, 2 seeds: for a CPU."),
    ] = False,
    summary: Annotated[
        Path | None, typer.Option(help="Write all records as one small file, which --draw can read.")
    ] = None,
    draw: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Run nothing: draw what a summary or a folder holds.")
    ] = None,
) -> None:
    """Is there a zone of positive curvature with biases, residual paths and norms, and does training like it?

    LeNet-300-100, LeNet-5 and ResNet-4 in five variants on Fashion-MNIST and CIFAR-10. Makes what the folder
    does not hold yet, part by part in the order of their worth, so that it can be stopped and goes on where
    it was; then prints the claims and draws the figures.

    Exits with 1 if a run failed, with 130 after Ctrl-C.

    [bold]Examples[/bold]

      theodolite study goldilocks --device cuda --part zone --part temperature

      theodolite study goldilocks --small --part zone --part logits

      theodolite study goldilocks --draw docs/studies/goldilocks.jsonl
    """
    from theodolite_studies.goldilocks.report import report

    if draw is not None:
        print(drawn(report, draw))
        return
    import dataclasses

    from theodolite.fleet.driver import check_engine
    from theodolite.fleet.engine import Resources
    from theodolite.present.bar import Bar
    from theodolite_studies.goldilocks.setting import FULL, SMALL
    from theodolite_studies.goldilocks.study import make, write_summary

    given = {
        "epochs": epochs,
        "images": images,
        "precision": precision,
        "seeds": None if seeds is None else tuple(range(seeds)),
    }
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    means = Resources(device=device)
    check_engine(engine, means)
    if jobs is not None:
        means = dataclasses.replace(means, jobs=jobs)
    made = make(
        out,
        setting=dataclasses.replace(SMALL if small else FULL, **changes),
        parts=part or (),
        engine=engine,
        means=means,
        progress=Bar(),
        tell=lambda line: print(line, file=sys.stderr, flush=True),
    )
    print(report(out))
    if summary is not None:
        write_summary(out, summary)
    if made is not None and not made.ok:
        raise typer.Exit(130 if made.stopped else 1)


QUESTIONS = {
    "ghosts": "Does training collapse where a step leaves the radius of convergence of the loss?",
    "refinement": "Is a schedule that was refined from the gradient norms of a first run a better one?",
    "lion": "Does Lion keep every weight within 1/λ, and does its Lyapunov function decrease?",
    "diffgrad": "Is diffGrad better than Adam, and than Adam at half the learning rate?",
    "drift": "Does the principal flow follow gradient descent where the gradient flow does not?",
    "smoothness": "How does gradient-normalized smoothness grow on the way to a minimum?",
}
"""By study: what it asks. Each is `STUDY` in the module of `theodolite_studies` of its name."""


def _command(name: str) -> Callable[..., None]:
    def study(
        out: Annotated[Path, typer.Option(help=RECORDS)] = Path(f"{name}.jsonl"),
        jobs: Annotated[int, typer.Option(min=1, help="Processes, one thread each.")] = 1,
        small: Annotated[bool, typer.Option("--small", help="Fewer cells: to see how it goes.")] = False,
        draw: Draw = None,
    ) -> None:
        found = importlib.import_module(f"theodolite_studies.{name}.study").STUDY
        carry_out(found, out, jobs=jobs, small=small, draw=draw)

    study.__doc__ = (
        f"{QUESTIONS[name]}\n\nRuns what the file of records does not hold yet, so that it goes on where it "
        "was stopped; then prints the claims and draws the figures from the file.\n\nExits with 1 if a cell "
        f"failed.\n\n[bold]Examples[/bold]\n\n  theodolite study {name} --small\n\n"
        f"  theodolite study {name} --draw docs/studies/{name}.jsonl"
    )
    return study


ghosts, refinement, lion, diffgrad, drift, smoothness = map(_command, QUESTIONS)
