"""The scale-vector study from end to end: two arms of two steps at a base size of 32 × 1."""

import dataclasses
import json

import pytest

from theodolite.core.errors import UseError
from theodolite.core.size import Size
from theodolite_studies.framework.study import conduct, read, report, summarise
from theodolite_studies.scale_vectors import arms
from theodolite_studies.scale_vectors.arms import SMALL, Arm
from theodolite_studies.scale_vectors.study import STUDY

TINY = dataclasses.replace(
    SMALL,
    steps=2,
    warmup=1,
    num=1,
    length=8,
    held_out=1,
    arms=tuple(Arm(each, (-7.0,), (0.5,), 2, size=Size(32, 1)) for each in ("plain", "heterogeneous")),
)
SMALLER = dataclasses.replace(STUDY, small=TINY)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out, said = tmp_path_factory.mktemp("study"), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arms, "BASE", Size(32, 1))
        conduct(
            SMALLER,
            out,
            setting=TINY,
            parts=["plain", "heterogeneous"],
            engine="vectorised",
            tell=said.append,
        )
        assert said == ["plain: 2 runs, 2 of them to make", "heterogeneous: 2 runs, 2 of them to make"]
        yield out


def test_what_was_made_is_not_made_again_and_starts_alike(folder):
    said = []
    conduct(SMALLER, folder, setting=TINY, parts=["plain"], tell=said.append)
    assert said == ["plain: 2 runs, 0 of them to make"]
    _, records = read(SMALLER, folder)
    assert {(one["arm"], one["seed"]) for one in records} == {
        (f"{structure} cosine paper", seed) for structure in ("plain", "heterogeneous") for seed in (0, 1)
    }


def test_a_summary_gathers_parts_from_several_folders_and_tells_the_same(folder, tmp_path):
    summary = tmp_path / "summary.jsonl"
    summarise(SMALLER, folder, summary)
    about, first, *rest = (json.loads(line) for line in summary.read_text().splitlines())
    assert about["study"] == "scale-vectors"
    assert len(rest) == 3
    other = tmp_path / "other.jsonl"
    other.write_text("".join(f"{json.dumps(each)}\n" for each in (about, first)))
    summarise(SMALLER, summary, other)
    assert other.read_text() == summary.read_text()
    told, again = report(SMALLER, folder), report(SMALLER, summary)
    assert told.splitlines()[:-1] == again.splitlines()[:-1]
    assert (tmp_path / "summary-differences.svg").exists()


def test_what_is_not_the_study_is_refused(tmp_path):
    with pytest.raises(UseError, match="the study has no part 'plan': it has plain"):
        conduct(STUDY, tmp_path, setting=SMALL, parts=["plan"])
    (tmp_path / "other.jsonl").write_text('{"study":"lion"}\n')
    with pytest.raises(UseError, match="is no file of the study 'scale-vectors'"):
        read(STUDY, tmp_path / "other.jsonl")
    (tmp_path / "odd.jsonl").write_text('{"study":"scale-vectors","steps":7}\n')
    with pytest.raises(UseError, match="no records of the study scale-vectors"):
        read(STUDY, tmp_path / "odd.jsonl")
