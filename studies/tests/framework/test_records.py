"""A study that was killed goes on where it was."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

import theodolite_studies
from theodolite import UseError
from theodolite_studies.framework.records import Records, read_records
from theodolite_studies.framework.study import RECORDS

ABOUT = {"study": "x", "sizes": (1, 2)}


def test_a_torn_last_line_is_lost_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "deeper" / "x.jsonl"
    Records(path, ABOUT).append([{"seed": 0}, {"seed": 1}])
    path.write_text(path.read_text() + '{"seed": 2, "val')
    assert read_records(path)[1] == [{"seed": 0}, {"seed": 1}]
    Records(path, ABOUT).append([{"seed": 3}])
    assert read_records(path) == ({"study": "x", "sizes": [1, 2]}, [{"seed": 0}, {"seed": 1}, {"seed": 3}])


def test_a_file_about_something_else_is_refused_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    Records(path, ABOUT).append([{"seed": 0}])
    before = path.read_bytes()
    with pytest.raises(UseError, match=r"x.jsonl was made with other settings .*another path"):
        Records(path, {**ABOUT, "sizes": (1, 3)})
    assert path.read_bytes() == before


@pytest.mark.parametrize("content", ["", "not JSON\n", "[1]\n", '{"torn'])
def test_what_is_no_file_of_records_is_an_error_of_use(tmp_path: Path, content: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(content)
    with pytest.raises(UseError, match="not a file of records"):
        read_records(path)
    with pytest.raises(UseError, match="run the study first"):
        read_records(tmp_path / "none.jsonl")


def test_no_measurement_of_a_study_counts_twice() -> None:
    for file in sorted(Path(theodolite_studies.__file__).parent.rglob(RECORDS)):
        lines = Counter(file.read_text(encoding="utf-8").splitlines())
        twice = [line for line, count in lines.items() if count > 1]
        assert twice == [], f"{file} has {len(twice)} lines more than once"
