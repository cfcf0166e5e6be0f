"""The growing study: its cells."""

import dataclasses

import pytest

from theodolite.cli import main
from theodolite_studies.framework.records import Records
from theodolite_studies.framework.study import RECORDS, conduct
from theodolite_studies.growing.study import STUDY, cells
from theodolite_studies.growing.training import FULL, SEEDS


def test_cells_come_in_the_order_of_their_worth_and_are_known_again(tmp_path):
    order = [(cell["part"], cell.get("added")) for cell in cells(FULL)]
    assert order[:6] == [("growing", 2)] * 3 + [("ranking", None)] * 3
    assert len(SEEDS) >= 3
    assert FULL.repetitions >= 2000
    said = []
    # With the names that real records have.
    others = {"way": "signal", "method": "betting", "kind": "grown", "variant": "new", "order": 0, "depth": 3}
    Records(tmp_path / RECORDS, {"study": "growing"}).append({**cell, **others} for cell in cells(FULL))
    # A cell that is not known again would fail at once.
    assert conduct(dataclasses.replace(STUDY, run=int), tmp_path, tell=said.append) == 0
    count = len(cells(FULL))
    assert said == [f"{count} of {count} cells are in {tmp_path / RECORDS}"]


def test_a_part_that_is_none_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["study", "growing", "--part", "growth"])
    assert "the study has no part 'growth': it has growing, ranking" in capsys.readouterr().err
