"""An Anatomy as a result: printed, saved, loaded."""

import json

import pytest

import theodolite as th
from theodolite import Size


@pytest.fixture(scope="module")
def anatomy() -> th.Anatomy:
    import torch

    return th.dissect(th.models.GPT, torch.zeros(2, 8, dtype=torch.long), size=Size(64, 2))


def test_it_can_be_saved_and_loaded(anatomy, tmp_path) -> None:
    file = anatomy.save(tmp_path / "anatomy.json")
    again = th.Anatomy.load(file)
    assert dict(again) == dict(anatomy)
    assert (again.branches, again.size, again.grown_blocks) == (anatomy.branches, Size(64, 2), 4)
    assert again.to_json() == anatomy.to_json()
    assert str(again) == str(anatomy)


def test_its_json_counts_parameters_and_blocks(anatomy) -> None:
    content = json.loads(anatomy.to_json())
    assert (content["parameters"], content["blocks"]) == (anatomy.num_parameters, 2)


def test_its_csv_has_a_row_for_each_tensor(anatomy, tmp_path) -> None:
    lines = anatomy.save(tmp_path / "anatomy.csv").read_text().splitlines()
    assert lines[0] == "tensor,role,shape,block,notes"
    assert len(lines) == 1 + len(anatomy)


def test_its_page_and_notebook_show_the_table(anatomy, tmp_path) -> None:
    page = anatomy.save(tmp_path / "anatomy.html").read_text()
    assert "blocks.*.attention.branch.out.weight" in page
    assert "<table" in anatomy._repr_html_()
