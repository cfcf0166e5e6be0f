"""The texts and the language models that several studies train on and train, by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from theodolite import data
from theodolite.core.batches import Batch
from theodolite.core.errors import UseError
from theodolite.data.batches import Split, Text
from theodolite.models import GPT
from theodolite.models.transformer import Placement
from theodolite.workloads import Workload, next_token_loss, workload

CONFIGS = Path(__file__).parent / "configs"
CONTEXT = 128
TEXTS: Mapping[str, Callable[[Split], Text]] = {"enwik8": data.enwik8, "sotu": data.state_of_the_union}


def batch_of(text: str, split: Split, num: int, length: int, seed: int, step: int) -> Batch:
    """`num` sequences of `length` bytes and the bytes that follow them, by seed and step alone.

    >>> batch_of("sotu", "validation", 2, 16, seed=0, step=0)[0].shape
    torch.Size([2, 16])
    """
    return data.draw_text(TEXTS[text](split), num=num, length=length, seed=seed, step=step)


def network(name: str, *, num: int, length: int) -> Workload:
    """One of `NETWORKS` on the bytes of the State of the Union, `num` sequences of `length` in a batch.

    >>> network("gpt-post", num=2, length=16).batch(0, 0)[0].shape
    torch.Size([2, 16])
    """
    if name not in NETWORKS:
        raise UseError(f"there is no network {name!r} in the studies: there are {', '.join(NETWORKS)}")
    return dataclasses.replace(
        NETWORKS[name](), name=name, batch=partial(batch_of, "sotu", "train", num, length)
    )


def _gpt(placement: Placement) -> Workload:
    build = partial(GPT, vocab=256, context=CONTEXT, norm_placement=placement)
    return Workload("gpt", build, partial(batch_of, "sotu", "train", 1, CONTEXT), next_token_loss)


def _config(name: str) -> Workload:
    return workload(f"hf:{CONFIGS / name}.json")


NETWORKS: Mapping[str, Callable[[], Workload]] = {
    "gpt-pre": partial(_gpt, "pre"),
    "gpt-post": partial(_gpt, "post"),
    "gpt-peri": partial(_gpt, "peri"),
    "gpt-out": partial(_gpt, "out"),
    "gpt-none": partial(_gpt, "none"),
    "hf-llama": partial(_config, "llama"),
    "hf-gpt2": partial(_config, "gpt2"),
}
"""Our GPT with its norms in five places; a Llama (grouped keys and values) and a GPT-2 (tied readout, biases,
learnt positions) of transformers. The dimension of a head is 32 at every width."""
