"""Names of metrics: which ones a metric may have, and which columns of a ledger's rows are metrics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from theodolite.core.files import plain_text

HELD_OUT_LOSS, ACCURACY, TRAIN_ACCURACY = EVALUATED = ("held-out loss", "accuracy", "train accuracy")
"""What can be recorded along training: the mean loss over the held-out batches, the part of their targets
whose logit is the largest, and the same over the last batch trained on."""
OWN_DIGEST = "optimizer_digest"
"""The reading with the hash of what the workload's own optimizer does."""
TAKEN = frozenset(
    (
        *("identity", "workload", "width", "depth", "size", "base", "base_width", "base_depth", "optimizer"),
        *("parameterization", "lr", "seed", "steps", "weight_decay", "decay", "eps", "vector_lr", "options"),
        *("vector_options", "init_scale", "temperature", "schedule", "warmup", "final", "precision"),
        *("held_out_batches", "every", "probes", "evaluate_every", "horizon"),
        *("batch", "planned_tokens", "base_batch", "base_planned_tokens"),
        *("status", "step", "held_out", "seconds", "device", "engine", "error", "ended", "attempts"),
        *("parameters", "tokens", "sizes", "loss", "gradient", OWN_DIGEST, *EVALUATED),
    )
)
"""Names with another meaning in the rows of a ledger: fields of a run, of its outcome, and readings."""
TAKEN_STARTS = ("options.", "vector_options.", "sizes.", "reading.")


def is_free(name: str) -> bool:
    """May a metric have this name?

    >>> is_free("solver iterations"), is_free("lr"), is_free(" ")
    (True, False, False)
    """
    well_formed = bool(name) and name == name.strip() and plain_text(name) == name
    return well_formed and name not in TAKEN and not name.startswith(TAKEN_STARTS)


def metrics_in(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """The metrics that rows of a ledger have, in the order in which they appear.

    >>> metrics_in([{"lr": 0.1, "tokens": 640, "solver iterations": 17.0}])
    ['solver iterations']
    """
    return [name for name in dict.fromkeys(name for row in rows for name in row) if is_free(name)]
