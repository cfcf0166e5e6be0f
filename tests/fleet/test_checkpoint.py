"""A run that goes on from a checkpoint ends with the numbers of one that was never stopped."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from torch import Tensor, nn

import theodolite as th
from theodolite.fleet.checkpoint import RunCheckpoint
from theodolite.fleet.driver import RunListener, conduct
from theodolite.fleet.engine import Resources
from theodolite.fleet.run import Run
from theodolite.fleet.training import train
from theodolite.optimizers import OPTIMIZERS

from . import tiny

TOKENS = torch.randint(17, (64, 3, 9), generator=torch.Generator().manual_seed(1))


def build(width: int, depth: int) -> nn.Module:
    return th.models.GPT(width, depth, vocab=17, context=8, head_dim=8, bias=True, norm="layer")


def batch(seed: int, step: int) -> tuple[Tensor, Tensor]:
    tokens = TOKENS[(step + 31 * seed) % 64]
    return tokens[:, :-1], tokens[:, 1:]


GPT = th.Workload("gpt", build, batch, lambda logits, y: nn.functional.cross_entropy(logits.mT, y))


class Stop(Exception):
    """What ends a run half-way."""


def stopping(workload: th.Workload, at: int) -> th.Workload:
    def batch(seed: int, step: int) -> tuple[Tensor, Tensor]:
        if step == at:
            raise Stop
        return workload.batch(seed, step)

    return dataclasses.replace(workload, batch=batch)


# One of second order wants second derivatives of the caller, which no run gives.
EVERY = [(name, {}) for name, spec in OPTIMIZERS.items() if not spec.second_order] + [
    ("sgd", {"momentum": 0.9})
]


@pytest.mark.parametrize("name, options", EVERY, ids=[f"{n}{''.join(o)}" for n, o in EVERY])
def test_a_stopped_run_goes_on_bit_for_bit(tmp_path: Path, name: str, options: dict[str, float]) -> None:
    if OPTIMIZERS[name].source == "pytorch_optimizer":
        pytest.importorskip("pytorch_optimizer")
    run = Run(
        "gpt",
        th.Size(16, 1),
        1e-2,
        name,
        base=th.Size(8, 1),
        steps=6,
        held_out=1,
        options=options,
        schedule="constant" if OPTIMIZERS[name].averages else "linear",
    )
    whole = train(run, GPT)
    said: list[str] = []
    file = tmp_path / "state.safetensors"
    for at in (2, 5):  # stopped twice
        with pytest.raises(Stop):
            train(run, stopping(GPT, at), checkpoint=RunCheckpoint(file, 0, said.append))
    steps_made = tiny_steps(file)
    resumed = train(run, GPT, checkpoint=RunCheckpoint(file, 0, said.append))
    assert said == []
    assert steps_made == 5
    assert tiny.numbers(resumed) == tiny.numbers(whole)
    assert len(set(dict(whole.metrics["loss"]).values())) == 6


def test_random_numbers_go_on_too(tmp_path: Path) -> None:
    run = dataclasses.replace(tiny.run(), probes=("gradient",), steps=6)
    file = tmp_path / "state.safetensors"
    with pytest.raises(Stop):
        train(run, stopping(tiny.plain, 3), checkpoint=RunCheckpoint(file, 0))
    resumed = train(run, tiny.plain, checkpoint=RunCheckpoint(file, 0))
    assert tiny.numbers(resumed) == tiny.numbers(train(run, tiny.plain))


def test_state_is_kept_only_so_often(tmp_path: Path) -> None:
    file = tmp_path / "state.safetensors"
    train(tiny.run(), tiny.plain, checkpoint=RunCheckpoint(file, 3600))
    assert not file.exists()


RUN = tiny.run(optimizer="sgd")  # without momentum: no state of the optimizer tells one network from another


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def overwrite(file: Path) -> None:
    file.write_bytes(b"\xff" * 4096)


def empty(file: Path) -> None:
    file.write_bytes(b"")


def of_another_network(file: Path) -> None:
    file.unlink()
    train(dataclasses.replace(RUN, size=th.Size(32, 2)), tiny.plain, checkpoint=RunCheckpoint(file, 0))


def without_a_state(file: Path) -> None:
    """Good tensors and a good model, but the optimizer's part is not there."""
    with safetensors.safe_open(file, "pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        about = json.loads(opened.metadata()["state"])
    about["dict"] = [pair for pair in about["dict"] if pair["tuple"][0] != "optimizer"]
    safetensors.torch.save_file(tensors, file, {"state": json.dumps(about)})


def one_bit(file: Path) -> None:
    """The lowest one of the last weight: any reader takes it for a good one."""
    content = bytearray(file.read_bytes())
    content[-4] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("damage", [cut, overwrite, empty, of_another_network, without_a_state, one_bit])
def test_a_file_that_is_no_good_is_told_and_left_aside(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    file = tmp_path / "state.safetensors"
    with pytest.raises(Stop):
        train(RUN, stopping(tiny.plain, 5), checkpoint=RunCheckpoint(file, 0))
    damage(file)
    said: list[str] = []
    outcome = train(RUN, tiny.plain, checkpoint=RunCheckpoint(file, 3600, said.append))
    assert tiny.numbers(outcome) == tiny.numbers(train(RUN, tiny.plain))
    assert len(said) == 1
    assert "state.safetensors is no good, its run begins again: " in said[0]


def test_a_checkpoint_that_cannot_be_written_is_told_once_and_the_run_goes_on(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    said: list[str] = []
    outcome = train(
        tiny.run(), tiny.plain, checkpoint=RunCheckpoint(tmp_path / "file" / "state", 0, said.append)
    )
    assert tiny.numbers(outcome) == tiny.numbers(train(tiny.run(), tiny.plain))
    assert len(said) == 1
    assert "cannot be written" in said[0]


def test_nothing_is_left_when_it_is_forgotten(tmp_path: Path) -> None:
    file = tmp_path / "state.safetensors"
    _leave_part(tmp_path / "state.safetensors.123.part")
    train(tiny.run(), tiny.plain, checkpoint=RunCheckpoint(file, 0))
    assert file.exists()
    RunCheckpoint(file).forget()
    assert list(tmp_path.iterdir()) == []


def _leave_part(folder: Path) -> None:
    """What a worker leaves that is killed while it writes."""
    folder.mkdir(parents=True)
    (folder / ".tmpQx3f1z").write_text("safetensors writes here first")


def test_a_checkpoint_is_written_whoever_removes_its_empty_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another driver that shares the folder finds it empty, again and again, and removes it."""
    file, removed, make = tmp_path / "folder" / "state.safetensors", 0, os.mkdir

    def mkdir(path: str, mode: int = 0o777, **keywords: Any) -> None:
        nonlocal removed
        if removed < 5 and Path(path).parent == file.parent:
            with contextlib.suppress(OSError):
                file.parent.rmdir()
                removed += 1
        make(path, mode, **keywords)

    monkeypatch.setattr(os, "mkdir", mkdir)
    said: list[str] = []
    file.parent.mkdir()
    train(tiny.run(steps=1), tiny.plain, checkpoint=RunCheckpoint(file, 0, said.append))
    assert said == []
    assert removed == 5
    assert [each.name for each in file.parent.iterdir()] == [file.name]


def test_the_driver_removes_the_folder_only_when_no_worker_is_left(tmp_path: Path) -> None:
    """While a run is at work its folder stays, also when the last checkpoint of the others has gone."""
    folder = tmp_path / "checkpoints"
    there: list[bool] = []

    class Watching(RunListener):
        def ended(self, outcome: object) -> None:
            there.append(folder.exists())

    _leave_part(folder / "gone.safetensors.1.part")  # of a run that nobody asks for any more
    resources = Resources(checkpoints=folder, checkpoint_seconds=0)
    conduct(
        [tiny.run(seed=seed, steps=2) for seed in (0, 1)],
        tiny.Shelf(),
        engine="serial",
        resources=resources,
        listener=Watching(),
    )
    assert there == [True, True]
    assert not folder.exists()


def tiny_steps(file: Path) -> int:
    """How many losses a file holds."""
    with safetensors.safe_open(file, "pt") as opened:
        parts = json.loads(opened.metadata()["state"])["dict"]
    (values,) = (pair["tuple"][1] for pair in parts if pair["tuple"][0] == "values")
    return len(values["dict"][0]["tuple"][1]["list"])
