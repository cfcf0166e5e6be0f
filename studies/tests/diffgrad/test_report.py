"""Claims about diffGrad on records whose verdict is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from theodolite_studies.diffgrad.study import STUDY
from theodolite_studies.framework.records import Records
from theodolite_studies.framework.study import report


def _records(gain: float = 0.0, best: float = 0.0) -> list[dict[str, Any]]:
    """diffGrad that is Adam at half the learning rate, less a part."""
    found = []
    for part, task in (("function", "F1"), ("network", "cnn")):
        for seed in range(3):
            for rate in range(-12, -7):
                loss = 1 + 0.1 * abs(rate + 9) + 1e-4 * seed
                own = {"part": part, "task": task, "seed": seed, "factor": 0.5}
                found.append({**own, "optimizer": "adam", "rate": rate, "loss": loss})
                if rate < -8:
                    lower = loss * (1 - gain) - best
                    found.append({**own, "optimizer": "diffgrad", "rate": rate + 1, "loss": lower})
    return found


def test_half_the_learning_rate_is_told_from_a_better_step() -> None:
    same = [claim.verdict for claim in STUDY.decide(_records())]
    assert same[4:] == ["fails", "holds", "holds"]
    better = [claim.verdict for claim in STUDY.decide(_records(gain=0.05))]
    assert better[1] == "holds"
    assert better[3:6] == ["holds", "holds", "fails"]


def test_the_report_draws_what_there_is(tmp_path: Path) -> None:
    Records(tmp_path / "records.jsonl", {"study": "diffgrad"}).append(_records())
    said = report(STUDY, tmp_path)
    assert "Adam at lr/2" in said
    for name in ("functions", "networks"):
        assert (tmp_path / f"{name}.svg").read_text().startswith("<svg")
