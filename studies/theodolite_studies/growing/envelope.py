"""Successive growths of one network, for the recursion `δ_{k+1} = δ_k − aδ_k^s` of the excess loss."""

from __future__ import annotations

from collections.abc import Iterator

from theodolite_studies.framework.records import Record
from theodolite_studies.growing.setting import Setting
from theodolite_studies.growing.signals import inserted, looked_at
from theodolite_studies.growing.training import Course, Lesson, Pupil, enrolled, judged, rounded, wsd


def grown_block_by_block(setting: Setting, seed: int, device: str) -> Iterator[Record]:
    """From one block to many, where gain·E[h²] is largest; beside it one block that trains as long.

    At the end of each stage a branch is trained on until its learning rate is zero: its loss counts.
    """
    lesson = Lesson.of(setting, device)
    for kind in ("grown", "alone"):
        pupil = enrolled(setting, setting.grown_width, 1, seed, device)
        for stage in range(setting.deepest):
            warmup = setting.warmup if stage == 0 or kind == "grown" else 0
            _trained(pupil, lesson, seed, stage * setting.stage, wsd(setting.stage, warmup=warmup, decay=0))
            branch = pupil.copied()
            factors = wsd(setting.stage_decay, warmup=0, decay=setting.stage_decay)
            _trained(branch, lesson, seed, (stage + 1) * setting.stage, factors)
            record = _record(kind, branch, lesson, (stage + 1) * setting.stage + setting.stage_decay)
            if kind == "grown":
                look = looked_at(pupil, lesson, f"{seed} {stage}")
                best = max(look.signal.points, key=look.relative)
                gains = {"gain": best.gain, "relative": look.relative(best)}
                record |= {name: rounded(value, 9) for name, value in gains.items()}
                inserted(pupil, look, best.point)
            yield record


def coupled(setting: Setting, seed: int, device: str) -> Iterator[Record]:
    """Networks from scratch whose depth grows as their width."""
    lesson = Lesson.of(setting, device)
    for width, depth in setting.coupled:
        pupil = enrolled(setting, width, depth, seed, device)
        steps = setting.coupled_steps
        _trained(pupil, lesson, seed, 0, wsd(steps, warmup=setting.warmup, decay=setting.decay))
        yield _record("coupled", pupil, lesson, steps)


def _trained(pupil: Pupil, lesson: Lesson, seed: int, first: int, factors: list[float]) -> None:
    Course(pupil, lesson, order=seed, first=first, factors=factors).go(len(factors))


def _record(kind: str, pupil: Pupil, lesson: Lesson, steps: int) -> dict[str, object]:
    embeddings = pupil.model.embed.weight.numel()
    parameters = sum(each.numel() for each in pupil.model.parameters())
    return {
        "kind": kind,
        "width": pupil.model.embed.embedding_dim,
        "depth": pupil.depth,
        "parameters": parameters - embeddings,
        "steps": steps,
        "loss": rounded(judged(pupil.model, lesson)),
    }
