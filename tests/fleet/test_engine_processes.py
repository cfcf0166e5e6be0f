"""Runs in processes give what they give one after the other."""

from __future__ import annotations

import dataclasses
import sys
from types import ModuleType

import pytest

import theodolite as th
from theodolite import UseError
from theodolite.fleet.engine import Resources, processes, serial, why_not_sent
from theodolite.fleet.run import Run

from . import tiny

RUNS = [tiny.run(seed=seed, width=width) for seed, width in enumerate((16, 24, 32))]


def test_the_same_numbers_as_one_after_the_other_longest_first() -> None:
    # A workload that was handed over, and one that is looked up by its name.
    given = th.workload("mlp-mixture")
    named = Run("given", th.Size(32, 2), 0.1, "muon-kimi", base=th.Size(16, 2), steps=5, held_out=1)
    runs = [*RUNS, dataclasses.replace(named, steps=1), tiny.own_run()]
    begun: list[Run] = []
    resources = Resources({"given": given}, jobs=1, begun=begun.append)
    found = {outcome.run.identity: outcome for outcome in processes(runs, resources)}
    alone = {outcome.run.identity: outcome for outcome in serial(runs, resources)}
    assert {key: tiny.numbers(each) for key, each in found.items()} == {
        key: tiny.numbers(each) for key, each in alone.items()
    }
    assert {outcome.status for outcome in found.values()} == {"finished"}
    assert {outcome.engine for outcome in found.values()} == {"processes"}
    assert [run.size.width for run in begun[:3]] == [32, 24, 16]


def test_a_workload_that_does_not_pickle_is_named() -> None:
    mine = dataclasses.replace(tiny.plain, name="mine", loss=lambda logits, targets: logits.sum())
    resources = Resources({"mine": mine})
    run = dataclasses.replace(tiny.run(), workload="mine")
    with pytest.raises(UseError, match=r"workload 'mine' cannot be sent .* give path/to/file\.py:name, or"):
        next(processes([run], resources))
    assert "workload 'mine'" in (why_not_sent([run], resources) or "")
    assert why_not_sent(RUNS, resources) is None  # it is not used
    assert why_not_sent([run], Resources({"mine": th.workload("mlp-mixture")})) is None


PROMPT = """
import dataclasses
def build(width, depth): return tiny.build(width, depth)
mine = dataclasses.replace(tiny.plain, build=build)
"""


def test_a_workload_made_at_a_prompt_is_named_too(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = ModuleType("__main__")  # of no file
    monkeypatch.setitem(sys.modules, "__main__", prompt)
    prompt.__dict__["tiny"] = tiny
    exec(PROMPT, prompt.__dict__)
    said = why_not_sent([dataclasses.replace(tiny.run(), workload="mine")], Resources({"mine": prompt.mine}))
    assert "workload 'mine' cannot be sent to another process: it was made in a notebook" in (said or "")


def test_a_workload_that_cannot_be_found_again_is_named() -> None:
    # As an object it refers to the file's module, which a worker does not know.
    looked_up = th.workload(f"{tiny.FILE}:plain")
    with pytest.raises(UseError, match=r"'mine' cannot be sent .* No module named 'theodolite_user"):
        next(processes([dataclasses.replace(tiny.run(), workload="mine")], Resources({"mine": looked_up})))
