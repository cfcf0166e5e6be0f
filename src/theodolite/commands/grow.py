"""`theodolite grow`."""

from __future__ import annotations

import dataclasses
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from theodolite.commands.options import Depth, Device, Page, Width, page_and_data
from theodolite.core.errors import UseError

Along = Literal["gradient", "preconditioned"]
Method = Literal["bernstein", "betting"]

SMALL = 10_000_000
"""Parameters up to which a network is run on one thread."""

if TYPE_CHECKING:
    from theodolite.growing.checkpoints import SavedNetwork


def grow(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            metavar="CHECKPOINT",
            help="A folder of save_pretrained, or the weights of a workload's network as safetensors.",
        ),
    ],
    data: Annotated[
        Path | None,
        typer.Option(help="A text, or safetensors with inputs and targets; by default the workload's data."),
    ] = None,
    certify: Annotated[Path | None, typer.Option(help="Examples to certify on, from another file.")] = None,
    blocks: Annotated[int, typer.Option(min=1, max=1000, help="Blocks to insert, one after the other.")] = 1,
    at: Annotated[
        list[str] | None, typer.Option(help="Try only this point, such as blocks.4; may be repeated.")
    ] = None,
    along: Annotated[
        Along, typer.Option(help="Direction of the jump: gradient or preconditioned.")
    ] = "preconditioned",
    contenders: Annotated[int, typer.Option(min=1, help="Points where a jump is tried.")] = 3,
    delta: Annotated[float, typer.Option(help="Probability that a certificate is wrong.")] = 0.05,
    method: Annotated[
        Method,
        typer.Option(help="Bound of the certificate; betting needs fewer examples. Choose beforehand."),
    ] = "bernstein",
    reach: Annotated[float, typer.Option(help="Longest jump, in units of the step radius.")] = 8.0,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Insert untrained blocks instead of copies of their neighbours.")
    ] = False,
    examples: Annotated[int, typer.Option(min=3, max=2**24, help="Most examples to use.")] = 2048,
    batch: Annotated[int, typer.Option(min=1, max=2**24, help="Examples in a batch.")] = 16,
    length: Annotated[int | None, typer.Option(min=1, max=2**24, help="Tokens in an example.")] = None,
    workload: Annotated[
        str | None, typer.Option(help="The workload of the weights: a built-in name or file.py:name.")
    ] = None,
    width: Width = None,
    depth: Depth = None,
    plan: Annotated[
        Path | None,
        typer.Option(
            help="The plan of its training, if the readout is tied and the file does not hold its multiplier."
        ),
    ] = None,
    device: Device = "cpu",
    seed: Annotated[int, typer.Option(help="Seed of the split and of fresh blocks.")] = 0,
    out: Page = Path("grow.html"),
    write: Annotated[
        Path | None, typer.Option(help="Write the grown network: a folder, or a file of safetensors.")
    ] = None,
) -> None:
    """Would one more block lower the loss, where, and how certain is that?

    Splits the examples into three parts. The first gives the signal at every point between blocks. With the
    second, a block that changes nothing is inserted where the signal is largest, and moved as far as that
    helps. The third, not used before, certifies the fall of the loss. Only a page is written, unless --write
    is given.

    Exits with 1 if no block helps or the certificate does not hold.

    [bold]Examples[/bold]

      theodolite grow my-llama/ --data text.txt

      theodolite grow my-llama/ --data text.txt --certify other.txt --blocks 2 --write my-deeper-llama/

      theodolite grow gpt.safetensors --workload model.py:workload --width 256 --depth 6

      theodolite grow gpt.safetensors --workload gpt-sotu --write grown.safetensors
    """
    from theodolite.core.building import check_device, one_thread
    from theodolite.growing import Grown, Splits, split
    from theodolite.growing import grow as make
    from theodolite.growing.checkpoints import build_again, check_target, save
    from theodolite.growing.sources import load_examples
    from theodolite.present.bar import Bar

    check_device(device)
    write_page = page_and_data(out, Grown)
    if write is not None:
        check_target(checkpoint.expanduser(), write := write.expanduser())
    found = _loaded(checkpoint, workload, width, depth, device, plan)
    drawn = load_examples(found, data, number=examples, batch=batch, length=length)
    splits = split(drawn, seed=seed)
    if certify is not None:
        others = load_examples(found, certify, number=examples, batch=batch, length=length)
        splits = Splits((*splits.estimate, *splits.certify), splits.choose, others, splits.repeated)
    # One thread is not slower for a small network, and far faster on a busy machine.
    small = sum(tensor.numel() for tensor in found.model.parameters()) <= SMALL
    with Bar() as bar, one_thread() if small else nullcontext():
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
    grown = dataclasses.replace(grown, name=found.name)
    print(grown)
    print(write_page(grown), file=sys.stderr)
    if write is not None and grown.new_blocks:
        said = save(found, grown.model, splits.inputs, grown.new_blocks, write)
        print(f"Written to {said}", file=sys.stderr)
    elif grown.new_blocks:
        print("The grown network was not written: give --write PATH", file=sys.stderr)
    if grown.certificate is None or not grown.certificate.holds:
        raise typer.Exit(1)


def _loaded(
    path: Path, workload: str | None, width: int | None, depth: int | None, device: str, plan: Path | None
) -> SavedNetwork:
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
            f"{path} is not a checkpoint: give a folder with a config.json, as save_pretrained writes it, or "
            "a file of safetensors"
        )
    for name, factor in found.multipliers.items():
        print(f"The input of {name} is multiplied by {factor:.4g}, as in training", file=sys.stderr)
    return found
