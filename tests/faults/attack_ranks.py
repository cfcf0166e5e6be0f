"""One of two processes fails in a probe that both take part in."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

from ..forking import start_script
from . import ranks
from .attack import Attack


def _failing_ranks(count: int, folder: Path) -> Iterator[str | None]:
    """Two processes are started once; a try that hangs ends them, and all that follow it fail."""
    printed = folder / "printed"
    environment = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    processes = [
        start_script(Path(ranks.__file__), [str(folder), str(rank), str(count)], printed, environment)
        for rank in range(2)
    ]
    # An exchange that nobody answers is given up by the process group, so both end.
    for process in processes:
        process.join()
    both = [
        [json.loads(line) for line in (folder / f"rank {rank}").read_text(encoding="utf-8").splitlines()]
        for rank in range(2)
    ]
    tries = itertools.islice(itertools.cycle(ranks.TRIES), count)
    said = printed.read_text(encoding="utf-8").strip().rpartition("\n")[2]
    for (probe, failure, bad), here in itertools.zip_longest(tries, zip(*both, strict=False)):
        if here is None:
            yield f"{probe}, {failure} on rank {bad}: a rank has waited in vain or ended: {said}"
        elif not all(one.pop("in step") for one in here):
            yield f"{probe}, {failure} on rank {bad}: the ranks are no longer in step"
        else:
            yield ranks.judged(probe, failure, bad, list(here))


ATTACKS = [
    Attack(
        "one of two ranks fails within a probe, or in a step of a matrix optimizer",
        "all ranks leave with its error, or with the same result; the next call works",
        _failing_ranks,
        few=38,
        many=268,
    )
]
