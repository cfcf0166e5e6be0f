"""Plain tables: every number is read back to the last digit, by readers that are not ours."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from typing import Any

import pytest
import torch
from tests.planning.exporting.made import gpt_plan, parts_plan
from torch import Tensor, nn

import theodolite as th
from theodolite.optimizers import OPTIMIZERS
from theodolite.planning.init_distribution import InitDistribution
from theodolite.planning.rows import WITHOUT_EPS, PlanRow

pytestmark = pytest.mark.usefixtures("one_dissection")

NUMBERS = ("lr", "weight_decay", "eps")


def _csv(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def _markdown(text: str) -> list[dict[str, str]]:
    lines = [line for line in text.splitlines() if line.startswith("|")]
    head, dashes, *body = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    assert set(dashes) == {"---"}
    return [dict(zip(head, cells, strict=True)) for cells in body]


def _yaml(text: str) -> list[dict[str, Any]]:
    yaml = pytest.importorskip("yaml")
    return list(yaml.safe_load(text)["tensors"])


READERS = {"csv": _csv, "markdown": _markdown, "yaml": _yaml}


def _shape(cell: Any) -> tuple[int, ...]:
    return tuple(map(int, cell.split("x"))) if isinstance(cell, str) else tuple(cell)


def _expected(row: PlanRow, name: str) -> float | None:
    if not row.trained or (name == "eps" and row.rule in WITHOUT_EPS):
        return None
    return float(getattr(row, name))


@pytest.mark.parametrize("optimizer", ["adamw", "muon-kimi", "sgd", "sophia", "sso", "lion"])
@pytest.mark.parametrize("format", READERS)
def test_a_table_has_one_line_for_each_tensor_with_every_digit(format: str, optimizer: str) -> None:
    plan = gpt_plan(optimizer)
    lines = READERS[format](plan.export(format).text)
    assert [line["tensor"] for line in lines] == list(plan.rows)
    for line, row in zip(lines, plan.rows.values(), strict=True):
        assert _shape(line["shape"]) == row.shape
        assert (line["role"], line["optimizer"]) == (row.role, row.rule)
        for name in NUMBERS:
            cell = line.get(name)
            if isinstance(cell, str):
                cell = float(cell) if cell else None
            assert cell == _expected(row, name), (row.name, name)
            assert cell is None or isinstance(cell, float)
        extent = OPTIMIZERS[row.rule].extent
        assert not line.get("extent") or extent is not None, "an option that the optimizer does not have"
        assert (line["init"], float(line["mean"]), float(line["std"])) == (
            row.init.kind,
            row.init.mean,
            row.init.std,
        )


@pytest.mark.parametrize("format", READERS)
def test_layouts_are_in_the_table(format: str) -> None:
    lines = {line["tensor"]: line for line in READERS[format](parts_plan().export(format).text)}
    said = lines["fused"]["rows"]
    assert said in ("0-14 14-22 22-30", [[[0, 14]], [[14, 22]], [[22, 30]]])
    assert lines["interleaved"]["rows"] in (
        "0-4+8-12+16-20 4-8+12-16+20-24",
        [[[0, 4], [8, 12], [16, 20]], [[4, 8], [12, 16], [20, 24]]],
    )
    assert lines["experts"]["in_axes"] in ("2", [2])


@pytest.mark.parametrize("format", READERS)
def test_a_multiplier_is_in_the_table(format: str) -> None:
    plan = gpt_plan(tied=True)
    lines = {line["tensor"]: line for line in READERS[format](plan.export(format).text)}
    (factor,) = plan.multipliers.values()
    assert float(lines["embed.weight"]["multiplier"]) == factor


def test_options_are_in_every_format() -> None:
    plan = parts_plan(("wide",), options={"momentum": 0.9})
    assert json.loads(_csv(plan.export("csv").text)[0]["options"]) == {"momentum": 0.9}
    assert '`{"momentum": 0.9}`' in plan.export("markdown").text
    yaml = pytest.importorskip("yaml")
    assert yaml.safe_load(plan.export("yaml").text)["options"] == {"muon": {"momentum": 0.9}}
    assert list(yaml.safe_load(gpt_plan("muon").export("yaml").text)["options"]) == ["muon", "adamw"]


def test_yaml_has_the_multipliers_by_module() -> None:
    yaml = pytest.importorskip("yaml")
    plan = gpt_plan(tied=True)
    assert yaml.safe_load(plan.export("yaml").text)["multipliers"] == dict(plan.multipliers)
    (factor,) = plan.multipliers.values()
    for module in ("on", "off", "no", "y", "a.b"):
        text = plan.export("yaml", names={"readout.*": f"{module}.*", "*": "*"}).text
        assert yaml.safe_load(text)["multipliers"] == {module: factor}


def test_names_that_yaml_would_misread_are_quoted() -> None:
    yaml = pytest.importorskip("yaml")
    text = parts_plan(("wide",)).export("yaml", names={"wide": "off"}).text
    assert yaml.safe_load(text)["tensors"][0]["tensor"] == "off"
    text = parts_plan(("wide",)).export("yaml", names={"wide": 'a: "b" # {c}'}).text
    assert yaml.safe_load(text)["tensors"][0]["tensor"] == 'a: "b" # {c}'


def test_csv_and_markdown_keep_names_with_their_separators() -> None:
    assert _csv(parts_plan(("wide",)).export("csv", names={"wide": 'a,"b"'}).text)[0]["tensor"] == 'a,"b"'
    assert "| a\\|b |" in parts_plan(("wide",)).export("markdown", names={"wide": "a|b"}).text


class HalfFrozen(nn.Module):
    """Two layers, the first of which is frozen."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.frozen, self.last = nn.Linear(3, width, bias=False), nn.Linear(width, 2, bias=False)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """Both."""
        y: Tensor = self.last(self.frozen(x).relu())
        return y


def test_tensors_that_are_not_trained_have_no_numbers() -> None:
    plan = th.plan(HalfFrozen, torch.zeros(2, 3), size=th.Size(16, 1), base=th.Size(8, 1), lr=0.1)
    line = {one["tensor"]: one for one in _csv(plan.export("csv").text)}["frozen.weight"]
    assert (line["role"], line["lr"], line["optimizer"], line["init"]) == ("frozen", "", "", "kept")
    assert (line["mean"], line["std"]) == ("", "")  # its values are those that it has


def test_only_values_that_the_network_draws_have_a_factor() -> None:
    plan = parts_plan(("wide", "tall"))
    own = InitDistribution("own", std=0.5, factor=0.25)
    plan.rows["tall"] = dataclasses.replace(plan.rows["tall"], init=own)  # type: ignore[index]
    assert [row["factor"] for row in _csv(plan.export("csv").text)] == ["", "0.25"]
