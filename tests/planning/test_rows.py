"""A plan on a terminal: everything is there, in few lines that fit."""

import fnmatch
from dataclasses import replace

import pytest

from .zoo import BASE, TARGET, Zoo, zoo_plan

pytestmark = pytest.mark.usefixtures("one_dissection")


def cells_of(text):
    """The table's lines by pattern, each as column: cell. Cells are told apart by where columns end."""
    lines = text.splitlines()
    top = next(number for number, line in enumerate(lines) if line.startswith("tensor"))
    heads = lines[top].split()
    found = {}
    for line in lines[top + 2 :]:
        if not line.strip():
            break
        pattern, *cells = line.replace("uniform ", "uniform:").replace("normal ", "normal:").split()
        found[pattern] = dict(zip(heads[1:], cells, strict=True))
    return found


def wide(monkeypatch, plan, width):
    """As printed on a terminal of that width."""
    monkeypatch.setenv("COLUMNS", str(width))
    return str(plan)


def test_every_tensor_is_in_one_line_with_its_numbers(monkeypatch):
    plan = zoo_plan()
    shown = cells_of(wide(monkeypatch, plan, 120))
    assert len(shown) == 20
    for row in plan.rows.values():
        (pattern,) = (one for one in shown if fnmatch.fnmatchcase(row.name, one))
        cells = shown[pattern]
        assert cells["role"] == row.role
        assert float(cells["lr"]) == pytest.approx(row.lr, rel=5e-3)
        assert float(cells["decay"]) == pytest.approx(row.weight_decay, rel=5e-3)
        assert float(cells["eps"]) == pytest.approx(row.eps, rel=5e-3)
        kind, _, std = cells["init"].rpartition(":")
        assert kind == ("" if row.init.kind == "constant" else row.init.kind)
        assert float(std) == pytest.approx(row.init.std if kind else row.init.mean, rel=5e-3)


@pytest.mark.parametrize("width", [70, 80, 100, 120])
def test_it_fits_the_terminal(monkeypatch, width):
    note = "The readout shares its tensor with the embedding, so its multiplier stays in the forward pass."
    text = wide(monkeypatch, replace(zoo_plan(optimizer="muon-kimi"), notes=(note,)), width)
    assert max(map(len, text.splitlines())) <= width
    assert note in " ".join(text.split())


def test_the_head_says_what_is_planned(monkeypatch):
    first, second, *_ = wide(monkeypatch, zoo_plan(optimizer="muon-kimi"), 100).splitlines()
    assert first == "muon-kimi beside adamw, 16 × 2 → 128 × 6 (width × 8, depth × 3)"
    assert second.startswith("at base size lr 0.0156, weight decay 0.1 (paper); 90 tensors in ")
    shrunk = str(zoo_plan(size=BASE, base=TARGET, weight_decay=0.0)).splitlines()
    assert shrunk[0] == "adamw, 128 × 6 → 16 × 2 (width × 0.125, depth × 0.333)"
    assert shrunk[1].startswith("at base size lr 0.0156; 34 tensors")


@pytest.mark.parametrize("optimizer", ["adamw", "lion", "sophia", "muon-kimi", "sso"])
def test_the_number_of_groups_is_that_of_the_optimizer(optimizer):
    plan = zoo_plan(optimizer=optimizer, weight_decay=0.0)
    num_groups = len(plan.param_groups(Zoo(TARGET.width, TARGET.depth)))
    assert str(plan).splitlines()[1].endswith(f" in {num_groups} groups")


def test_columns_that_would_say_nothing_are_left_out():
    def heads(plan):
        return next(line for line in str(plan).splitlines() if line.startswith("tensor")).split()[1:]

    assert heads(zoo_plan()) == ["role", "init", "lr", "decay", "eps"]
    assert heads(zoo_plan(optimizer="sgd", weight_decay=0.0)) == ["role", "init", "lr"]
    assert heads(zoo_plan(optimizer="muon")) == ["role", "rule", "init", "lr", "decay", "eps"]
    assert heads(zoo_plan(optimizer="sso"))[-1] == "radius"
    plan = zoo_plan()
    tied = replace(plan["last.weight"], multiplier=0.125)
    with_one = replace(plan, rows={**plan.rows, "last.weight": tied})
    assert heads(with_one) == ["role", "multiplier", "init", "lr", "decay", "eps"]


def test_blocks_that_differ_say_which_they_are(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    plan = zoo_plan()
    odd = {name: replace(row, lr=1.0) for name, row in plan.rows.items() if name == "blocks.3.up.weight"}
    lines = [
        line for line in str(replace(plan, rows={**plan.rows, **odd})).splitlines() if ".up.weight" in line
    ]
    assert [line.split("  ")[0] for line in lines] == ["blocks.*.up.weight (0–2, 4–5)", "blocks.3.up.weight"]
