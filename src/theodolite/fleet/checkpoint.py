"""A run that was stopped half-way, as one file of safetensors."""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from theodolite.errors import UseError


@dataclass
class Checkpoint:
    """Where a run keeps its state, and how often.

    Args:
        path: of the file. It is written beside and renamed, so it is whole or not there.
        seconds: between two states that are kept; 0 for one after every step.
    """

    path: Path
    seconds: float = 60.0
    _last: float = field(default_factory=time.monotonic, repr=False)

    def keep(self, model: nn.Module, optimizer: Optimizer, values: dict[str, list[float]]) -> None:
        """Write the state, if it is time. It is of the step whose loss was the last that was noted."""
        if time.monotonic() - self._last < self.seconds:
            return
        from safetensors.torch import save_file

        state = optimizer.state_dict()
        tensors: dict[str, Tensor] = {f"model/{name}": value for name, value in _own(model).items()}
        plain: dict[str, Any] = {}
        for index, entries in state["state"].items():
            for key, value in entries.items():
                if isinstance(value, Tensor):
                    tensors[f"optimizer/{index}/{key}"] = value
                else:
                    plain[f"{index}/{key}"] = value
        tensors["random"] = torch.get_rng_state()
        device = next(model.parameters()).device
        if device.type == "cuda":
            tensors["random on the device"] = torch.cuda.get_rng_state(device)
        about = {"values": json.dumps(values), "plain": json.dumps(plain)}
        beside = self.path.with_name(f".{self.path.name}.{os.getpid()}.part")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            save_file({name: value.contiguous() for name, value in tensors.items()}, beside, about)
            beside.replace(self.path)
        except OSError as error:
            raise UseError(f"the checkpoint {self.path} cannot be written: {error.strerror}") from error
        finally:
            with contextlib.suppress(OSError):
                beside.unlink()
        self._last = time.monotonic()

    def restore(self, model: nn.Module, optimizer: Optimizer) -> dict[str, list[float]]:
        """Take over what was kept, and give the values of the steps made; nothing if there is no file."""
        if not self.path.is_file():
            return {}
        from safetensors import safe_open

        with safe_open(self.path, "pt") as file:
            about = file.metadata()
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        own = _own(model)
        with torch.no_grad():
            for name, value in own.items():
                value.copy_(tensors[f"model/{name}"])
        state = optimizer.state_dict()
        kept: dict[int, dict[str, Any]] = {}
        for name, value in tensors.items():
            if name.startswith("optimizer/"):
                _, index, key = name.split("/", 2)
                kept.setdefault(int(index), {})[key] = value
        for name, value in json.loads(about["plain"]).items():
            index, key = name.split("/", 1)
            kept.setdefault(int(index), {})[key] = value
        optimizer.load_state_dict({**state, "state": kept})
        torch.set_rng_state(tensors["random"])
        if "random on the device" in tensors:
            torch.cuda.set_rng_state(tensors["random on the device"], next(model.parameters()).device)
        values: dict[str, list[float]] = json.loads(about["values"])
        return values

    def forget(self) -> None:
        """The run is over."""
        self.path.unlink(missing_ok=True)


def _own(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, each once; buffers that are not saved otherwise too."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
