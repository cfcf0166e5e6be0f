"""`theodolite grow`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from theodolite.commands.options import Depth, Width
from theodolite.core.errors import UseError

Along = Literal["gradient", "preconditioned"]
Method = Literal["bernstein", "betting"]

SMALL = 10_000_000
"""Parameters up to which a network is run on one thread."""

if TYPE_CHECKING:
    from torch import nn

    from theodolite.growing.checkpoints import Checkpoint


def grow(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            metavar="CHECKPOINT",
            help="A folder of save_pretrained, or a workload's weights as safetensors.",
        ),
    ],
    data: Annotated[
        Path | None,
        typer.Option(
            help="Units: a text, or safetensors with inputs and targets. The workload's own if not given."
        ),
    ] = None,
    certify: Annotated[
        Path | None, typer.Option(help="Units to certify on, from a file of their own.")
    ] = None,
    blocks: Annotated[int, typer.Option(min=1, max=1000, help="How many, one after the other.")] = 1,
    at: Annotated[
        list[str] | None, typer.Option(help="Try this point alone, as blocks.4; may be repeated.")
    ] = None,
    along: Annotated[
        Along, typer.Option(help="Jump along the gradient, or the preconditioned one.")
    ] = "preconditioned",
    contenders: Annotated[int, typer.Option(min=1, help="Points where a jump is tried.")] = 3,
    delta: Annotated[float, typer.Option(help="Chance that a certificate is wrong.")] = 0.05,
    method: Annotated[
        Method, typer.Option(help="Of the certificate; betting needs fewer units. Choose before looking.")
    ] = "bernstein",
    reach: Annotated[float, typer.Option(help="Longest jump, in units of the step radius.")] = 8.0,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="New blocks start untrained, not as copies of their neighbours.")
    ] = False,
    units: Annotated[int, typer.Option(min=3, max=2**24, help="How many to use at most.")] = 2048,
    batch: Annotated[int, typer.Option(min=1, max=2**24, help="Units that are run together.")] = 16,
    length: Annotated[int | None, typer.Option(min=1, max=2**24, help="Tokens in a unit of text.")] = None,
    workload: Annotated[
        str | None, typer.Option(help="Which network the weights are of: a built-in name or file.py:name.")
    ] = None,
    width: Width = None,
    depth: Depth = None,
    plan: Annotated[
        Path | None,
        typer.Option(
            help="The plan it was trained under, if its readout is tied and the checkpoint does not say."
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:1.")] = "cpu",
    seed: Annotated[int, typer.Option(help="Of the split of the units, and of fresh blocks.")] = 0,
    out: Annotated[Path, typer.Option(help="The page; the same as JSON goes beside it.")] = Path("grow.html"),
    write: Annotated[
        Path | None, typer.Option(help="Keep the grown network: a folder, or a file of safetensors.")
    ] = None,
) -> None:
    """Would one more block help, where, and how sure is that?

    Cuts the units in three. On the first part it measures the signal at every point between blocks; on the
    second it inserts a block that changes nothing where the signal is largest, and moves it as far as that
    helps; on the third, which had no part in this, it certifies the fall of the loss. Nothing is written but
    a page, unless --write says where.

    Exits with 1 if no block helps or the certificate does not hold.

    [bold]Examples[/bold]

      theodolite grow my-llama/ --data text.txt

      theodolite grow my-llama/ --data text.txt --certify other.txt --blocks 2 --write my-deeper-llama/

      theodolite grow gpt.safetensors --workload model.py:workload --width 256 --depth 6

      theodolite grow gpt.safetensors --workload gpt-sotu --write grown.safetensors
    """
    from theodolite.core.building import check_device
    from theodolite.core.files import html_path
    from theodolite.growing import grow as make
    from theodolite.growing import split
    from theodolite.growing.checkpoints import build_again, check_target, example, save
    from theodolite.growing.material import units as gather
    from theodolite.growing.page import save_page
    from theodolite.growing.splits import Splits
    from theodolite.present.bar import Bar

    check_device(device)
    html_path(out, kind="growth")
    if write is not None:
        check_target(checkpoint.expanduser(), write := write.expanduser())
    found = _loaded(checkpoint, workload, width, depth, device, plan)
    drawn = gather(found, data, number=units, batch=batch, length=length)
    if certify is None:
        splits = split(drawn, seed=seed)
    else:
        first = split(drawn, seed=seed)
        others = gather(found, certify, number=units, batch=batch, length=length)
        splits = Splits((*first.estimate, *first.certify), first.choose, others, first.repeated)
    with Bar() as bar, _threads(found.model):
        grown = make(
            found.model,
            found.loss,
            splits,
            blocks=blocks,
            at=None if at is None else [int(each) if each.isdigit() else each for each in at],
            along=along,
            contenders=contenders,
            delta=delta,
            method=method,
            reach=reach,
            fresh=build_again(found, seed) if fresh else None,
            progress=bar,
        )
    print(grown)
    page = save_page(grown, found.name, out)
    print(f"The page is {page}, the same as data {page.with_suffix('.json')}", file=sys.stderr)
    if write is not None and grown.blocks:
        said = save(found, grown.model, example(splits.choose), grown.blocks, write)
        print(f"Written to {said}", file=sys.stderr)
    elif grown.blocks:
        print("Nothing else was written: --write PATH keeps the grown network", file=sys.stderr)
    if grown.certificate is None or not grown.certificate.holds:
        raise typer.Exit(1)


def _loaded(
    path: Path, workload: str | None, width: int | None, depth: int | None, device: str, plan: Path | None
) -> Checkpoint:
    from theodolite.growing.checkpoints import load_file, load_folder
    from theodolite.planning import Plan

    path = path.expanduser()
    by = None if plan is None else Plan.load(plan)
    if (path / "config.json").is_file():
        found = load_folder(path, device, by)
    elif path.is_file():
        found = load_file(path, workload, width, depth, device, by)
    else:
        raise UseError(
            f"{path} is no checkpoint: give a folder with a config.json, as save_pretrained writes it, or a "
            "file of safetensors"
        )
    for name, factor in found.multipliers.items():
        print(f"What {name} reads is multiplied by {factor:.4g}, as in training", file=sys.stderr)
    return found


@contextmanager
def _threads(model: nn.Module) -> Iterator[None]:
    """One thread for a small network, which is no slower for it and far faster on a busy machine."""
    from theodolite.core.building import one_thread

    if sum(tensor.numel() for tensor in model.parameters()) > SMALL:
        yield
        return
    with one_thread():
        yield
