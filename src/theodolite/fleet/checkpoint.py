"""Checkpoints of runs: model, optimizer, losses and random states in one file of safetensors."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from theodolite.core.batches import device_of
from theodolite.core.building import in_one_line

PART = ".part"


def clear(folder: Path) -> None:
    """Remove half-written files of killed workers, and the folder if it is empty then.

    Call it when no worker is left: one could be about to write its first checkpoint.
    """
    with contextlib.suppress(OSError):
        for part in folder.glob(f"*{PART}"):
            shutil.rmtree(part, ignore_errors=True)
        folder.rmdir()


@dataclass
class RunCheckpoint:
    """Where a run keeps its state, and how often. An error with it is reported and does not end the run.

    Args:
        path: of the file. It is written beside and renamed, so it is whole or not there.
        seconds: between two checkpoints; 0 for one after every step.
        said: called with a message when the file cannot be read or written.
        enters: the state that a longer run left at the step where this one branches off, if there is one.
        leaves: by step, where to keep the state for shorter runs.
    """

    path: Path
    seconds: float = 60.0
    said: Callable[[str], None] = field(default=lambda line: None, repr=False)
    enters: Path | None = None
    leaves: Mapping[int, Path] = field(default_factory=dict)
    _last: float = field(default_factory=time.monotonic, repr=False)

    def keep(self, model: nn.Module, optimizer: Optimizer, values: Mapping[str, list[float]]) -> None:
        """Write the state after the last step in `values`, if it is time."""
        if time.monotonic() - self._last < self.seconds:
            return
        if not self._write(self.path, model, optimizer, values):
            self.seconds = float("inf")
        self._last = time.monotonic()

    def leave(
        self, step: int, model: nn.Module, optimizer: Optimizer, values: Mapping[str, list[float]]
    ) -> None:
        """Write the state after some steps, if a shorter run begins there."""
        if step in self.leaves and not self.leaves[step].exists():
            self._write(self.leaves[step], model, optimizer, values)

    def _write(
        self, path: Path, model: nn.Module, optimizer: Optimizer, values: Mapping[str, list[float]]
    ) -> bool:
        """Write the state to a file; False, and a message, if that cannot be."""
        from safetensors.torch import save_file

        tensors: dict[str, Tensor] = {}
        try:
            parts = {"values": values, "model": _own(model), "optimizer": optimizer.state_dict()}
            about = json.dumps(_packed({**parts, "random": _random(model)}, tensors))
            with _beside(path) as beside:
                save_file(tensors, beside, {"state": about, "digest": _digest(about, tensors)})
                beside.replace(path)
        except Exception as error:  # an unknown object in an optimizer, or a full disk
            self.said(f"{path.name} cannot be written, its run has no checkpoint: {in_one_line(error)}")
            return False
        return True

    def restore(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        fit: Callable[[Mapping[str, list[float]]], bool] = lambda values: True,
    ) -> dict[str, list[float]]:
        """Load the state, and give the values of the steps made; nothing if there is no good file.

        The run's own file comes before that of a longer run. The model and the optimizer change only if all
        of the file is good, and its values fit.
        """
        found = [path for path in (self.path, self.enters) if path is not None and path.exists()]
        if not found:
            return {}
        try:
            state = _read(found[0])
            own, kept = _own(model), state["model"]
            if {name: value.shape for name, value in own.items()} != {n: v.shape for n, v in kept.items()}:
                raise ValueError("it is of another network")
            values = {name: [float(one) for one in each] for name, each in state["values"].items()}
            if not fit(values):
                raise ValueError("it has other evaluations than the run makes now")
            cpu, device = state["random"]["cpu"], state["random"]["device"]
            optimizer.load_state_dict(state["optimizer"])
        except Exception as error:  # whatever is wrong with it, the run can begin again
            self.said(f"{found[0].name} is no good, its run begins again: {in_one_line(error)}")
            return {}
        with torch.no_grad():
            for name, value in own.items():
                value.copy_(kept[name])
        torch.set_rng_state(cpu)
        if (where := device_of(model)).type == "cuda" and device is not None:
            torch.cuda.set_rng_state(device, where)
        return values

    def forget(self) -> None:
        """Remove the files that this run alone reads, and half-written ones of killed workers."""
        for path in (self.path, self.enters):
            with contextlib.suppress(OSError):
                if path is not None:
                    path.unlink()
        with contextlib.suppress(OSError):
            for part in self.path.parent.glob(f"{self.path.name}.*{PART}"):
                shutil.rmtree(part, ignore_errors=True)


def _read(path: Path) -> dict[str, Any]:
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        about = file.metadata()
    if about["digest"] != _digest(about["state"], tensors):
        raise ValueError("it is damaged, its digest does not match")
    return _unpacked(json.loads(about["state"]), tensors)


@contextlib.contextmanager
def _beside(path: Path) -> Iterator[Path]:
    """A path to write to, in a folder of its own, since safetensors writes another file beside it."""
    folder = path.with_name(f"{path.name}.{os.getpid()}{PART}")
    for _ in range(1000):
        with contextlib.suppress(FileNotFoundError):  # another driver may remove an empty folder just now
            folder.mkdir(parents=True, exist_ok=True)
            break
    try:
        yield folder / "state"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _own(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, each once, also buffers that a state dict leaves out."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _random(model: nn.Module) -> dict[str, Tensor | None]:
    on_cuda = (where := device_of(model)).type == "cuda"
    return {"cpu": torch.get_rng_state(), "device": torch.cuda.get_rng_state(where) if on_cuda else None}


def _digest(state: str, tensors: Mapping[str, Tensor]) -> str:
    """The SHA-256 of all that a file holds, as a flipped bit in a weight is still a weight."""
    digest = hashlib.sha256(state.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _packed(value: Any, tensors: dict[str, Tensor]) -> Any:
    """The value as JSON; its tensors, also those in lists and dictionaries, go to `tensors`.

    >>> tensors = {}
    >>> packed = _packed({0: {"step": 3, "bases": [torch.ones(2), None]}}, tensors)
    >>> _unpacked(json.loads(json.dumps(packed)), tensors)
    {0: {'step': 3, 'bases': [tensor([1., 1.]), None]}}
    """
    if isinstance(value, Tensor):
        name = str(len(tensors))
        # A copy: safetensors refuses tensors that share memory, and the device may have none to spare.
        tensors[name] = value.detach().to("cpu", copy=True).contiguous()
        return {"tensor": name}
    if isinstance(value, Mapping):
        return {"dict": [_packed(pair, tensors) for pair in value.items()]}
    if isinstance(value, (list, tuple)):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_packed(item, tensors) for item in value]}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"{value!r} is neither a number, a text nor a tensor")


def _unpacked(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content]
    items = [_unpacked(item, tensors) for item in content]
    return {"list": list, "tuple": tuple, "dict": dict}[kind](items)
