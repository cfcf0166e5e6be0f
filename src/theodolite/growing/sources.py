"""Examples to grow a network on: from a text, from a file of tensors, or the workload's own."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from theodolite.core.batches import Batch
from theodolite.core.errors import UseError
from theodolite.core.examples import num_examples
from theodolite.growing.checkpoints import SavedNetwork, read_safetensors

LENGTH = 256
"""Default number of tokens in an example of text."""


def load_examples(
    network: SavedNetwork, file: Path | None, *, number: int, batch: int, length: int | None = None
) -> list[Batch]:
    """Batches with at most `number` examples in all.

    Args:
        network: the network to grow.
        file: `.safetensors` with `inputs` and `targets`, or a text; None for the workload's held-out batches.
        number: of examples.
        batch: examples in a batch.
        length: tokens in an example of text.
    """
    if file is None:
        return _own(network, number)
    file = file.expanduser()
    if not file.is_file():
        raise UseError(f"--data {file} does not exist")
    if file.suffix == ".safetensors":
        return _batched(*_tensors(file), number=number, batch=batch)
    tokens = _tokens(network, file)
    length = length or _length(network)
    windows = (len(tokens) - 1) // length
    if windows < 1:
        raise UseError(f"{file} has {len(tokens)} tokens, less than one example of {length}: give --length")
    # Spread over the whole text, as neighbours are not independent.
    chosen = torch.linspace(0, windows - 1, min(number, windows), dtype=torch.float64).round().long()
    starts = chosen[:, None] * length + torch.arange(length)[None]
    return _batched(tokens[starts], tokens[starts + 1], number=number, batch=batch)


def _own(network: SavedNetwork, number: int) -> list[Batch]:
    if network.workload is None:
        raise UseError(f"{network.path} has no data: give --data, a text or a file of safetensors")
    found: list[Batch] = []
    there = 0
    while there < number:
        drawn = network.workload.draw_held_out(len(found))
        found.append(drawn)
        there += num_examples(drawn)
    return found


def _tensors(file: Path) -> tuple[Tensor, Tensor]:
    _, held = read_safetensors(file)
    missing = [name for name in ("inputs", "targets") if name not in held]
    if missing:
        raise UseError(f"{file} has no tensor {missing[0]!r}, only {', '.join(sorted(held)) or 'nothing'}")
    flat = [name for name in ("inputs", "targets") if held[name].ndim == 0]
    if flat:
        raise UseError(f"{file}: {flat[0]} is one number: dimension 0 must be the examples")
    if len(held["inputs"]) != len(held["targets"]):
        raise UseError(
            f"{file} has {len(held['inputs'])} inputs and {len(held['targets'])} targets: dimension 0 of "
            "both must be the examples"
        )
    return held["inputs"], held["targets"]


def _batched(inputs: Tensor, targets: Tensor, *, number: int, batch: int) -> list[Batch]:
    count = min(number, len(inputs))
    return [
        (inputs[start : start + batch], targets[start : start + batch])
        for start in range(0, count - count % batch or count, batch)
    ]


def _tokens(network: SavedNetwork, file: Path) -> Tensor:
    """The tokens of a text: by the model's own tokenizer if it has one, else bytes."""
    text = file.read_bytes()
    if network.workload is None and any(network.path.glob("token*.json")):
        import transformers

        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(
            network.path, local_files_only=True, trust_remote_code=False
        )
        return torch.tensor(tokenizer(text.decode("utf-8", "replace"))["input_ids"])
    vocabulary = _vocabulary(network)
    if vocabulary < 256:
        raise UseError(
            f"{file} is a text, and {network.path} has no tokenizer and only {vocabulary} tokens, too "
            "few for bytes: give --data a file of safetensors with inputs and targets"
        )
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def _vocabulary(network: SavedNetwork) -> int:
    config = getattr(network.model, "config", None)
    if config is not None:
        return int(config.vocab_size)
    tables = [each for each in network.model.modules() if isinstance(each, torch.nn.Embedding)]
    return tables[0].num_embeddings if tables else 0


def _length(network: SavedNetwork) -> int:
    if network.workload is not None:
        inputs, _ = network.workload.draw(0, 0)
        return int(inputs.shape[-1]) if isinstance(inputs, Tensor) else LENGTH
    longest = getattr(network.model.config, "max_position_embeddings", None) or math.inf
    return int(min(LENGTH, longest))
