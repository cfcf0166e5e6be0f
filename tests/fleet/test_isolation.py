"""A run gives the same numbers whatever ran before it or its caller has set, and leaves no trace."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import theodolite as th
from theodolite.fleet.engine import Resources, serial
from theodolite.fleet.isolation import _CALLERS, _SETTINGS
from theodolite.fleet.run import Run

from . import tiny

SPOILERS: dict[str, Callable[[], Any]] = {
    "default dtype": lambda: torch.set_default_dtype(torch.float64),
    "default device": lambda: torch.set_default_device("meta"),
    "gradients": lambda: torch.set_grad_enabled(False),
    "inference mode": lambda: KEPT.append(torch.inference_mode()) or KEPT[-1].__enter__(),
    "autocast": lambda: torch.set_autocast_enabled("cpu", True),
    "threads": lambda: torch.set_num_threads(2),
    "deterministic": lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    "anomaly mode": lambda: torch.autograd.set_detect_anomaly(True, check_nan=False),
    "flush denormal": lambda: torch.set_flush_denormal(True),
    "precision": lambda: torch.set_float32_matmul_precision("medium"),
    "precision in the new way": lambda: setattr(torch.backends, "fp32_precision", "tf32"),
    "no oneDNN": lambda: setattr(torch.backends.mkldnn, "enabled", False),
    "no fused attention": lambda: torch.backends.cuda.enable_flash_sdp(False),
    "folder": lambda: os.chdir("/"),
    "a variable": lambda: os.environ.update(TINY_SPOILED="1"),
    "all variables": lambda: os.environ.clear(),
    "sys.path": lambda: sys.path.insert(0, "/nowhere"),
    "warnings": lambda: warnings.simplefilter("ignore"),
    "errors of numpy": lambda: np.seterr(all="raise"),
    "torch's random numbers": lambda: torch.manual_seed(7),
    "numpy's random numbers": lambda: np.random.seed(7),
    "Python's random numbers": lambda: random.seed(7),
}
KEPT: list[Any] = []


def state() -> dict[str, Any]:
    """All that a run may not change, read without the code under test where that is possible."""
    numpy = np.random.get_state()
    return {
        "dtype": torch.empty(0).dtype,
        "device": (torch.empty(0).device.type, torch.get_default_device().type),
        "gradients": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "autocast": torch.is_autocast_enabled("cpu"),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "anomaly": (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        "denormal": (torch.full((1,), 1e-40, device="cpu", dtype=torch.float32) * 1).item(),
        "precision": (torch.backends.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision),
        "oneDNN": torch.backends.mkldnn.enabled,
        "attention": torch.backends.cuda.flash_sdp_enabled(),
        "folder": os.getcwd(),
        "variables": dict(os.environ),
        "path": list(sys.path),
        "warnings": list(warnings.filters),
        "numpy": np.geterr(),
        "random": (torch.get_rng_state().tolist(), numpy[1].tolist(), numpy[2], random.getstate()),
    }


@pytest.fixture
def restored() -> Iterator[None]:
    with restored_settings():
        yield


@contextlib.contextmanager
def restored_settings() -> Iterator[None]:
    """Whatever a test sets is put back by hand: the code under test is not trusted with it."""
    with warnings.catch_warnings(), np.errstate():
        folder, path, variables = os.getcwd(), list(sys.path), dict(os.environ)
        yield
        while KEPT:
            KEPT.pop().__exit__(None, None, None)
        os.chdir(folder)
        sys.path[:] = path
        os.environ.clear()
        os.environ.update(variables)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    vars(torch._GLOBAL_DEVICE_CONTEXT).pop("device_context", None)
    torch.set_grad_enabled(True)
    torch.set_autocast_enabled("cpu", False)
    torch.use_deterministic_algorithms(False)
    torch.autograd.set_detect_anomaly(False, check_nan=True)
    torch.set_flush_denormal(False)
    torch.backends.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.fp32_precision = torch.backends.mkldnn.matmul.fp32_precision = "none"
    torch.backends.mkldnn.enabled = True
    torch.backends.cuda.enable_flash_sdp(True)


def spoiling(name: str, when: str) -> tuple[Run, Resources]:
    """A run whose workload changes a setting while a batch is drawn, and then maybe fails."""

    def batch(seed: int, step: int) -> Any:
        drawn = tiny.batch(seed, step)
        if step == 3:
            SPOILERS[name]()
            if when == "error":
                raise ArithmeticError("and it fails")
        return drawn

    workload = dataclasses.replace(tiny.plain, name="spoiling", batch=batch)
    return dataclasses.replace(tiny.run(steps=4), workload="spoiling"), Resources({"spoiling": workload})


@pytest.fixture(scope="module")
def alone() -> Any:
    (outcome,) = serial([tiny.run(steps=4)], Resources())
    return tiny.numbers(outcome)


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize("name", SPOILERS)
@pytest.mark.parametrize("when", ["batch", "error"])
def test_what_a_run_sets_ends_with_it(name: str, when: str, alone: Any) -> None:
    run, resources = spoiling(name, when)
    before = state()
    list(serial([run], resources))
    after = state()
    assert {key for key in before if before[key] != after[key]} == set()
    (next_one,) = serial([tiny.run(steps=4)], Resources())
    assert tiny.numbers(next_one) == alone


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize("name", SPOILERS)
def test_what_the_caller_has_set_changes_no_number_and_stays_set(name: str, alone: Any) -> None:
    SPOILERS[name]()
    before = state()
    (outcome,) = serial([tiny.run(steps=4)], Resources())
    after = state()
    assert outcome.error is None
    assert tiny.numbers(outcome) == alone
    assert {key for key in before if before[key] != after[key]} == set()


def test_two_runs_draw_the_same_random_numbers_as_one() -> None:
    """A loss with random numbers of torch, numpy and Python's own."""

    def batch(seed: int, step: int) -> Any:
        inputs, targets = tiny.batch(seed, step)
        return inputs + torch.randn(()) + np.random.randn() + random.random(), targets

    resources = Resources({"noisy": dataclasses.replace(tiny.plain, batch=batch)})
    runs = [dataclasses.replace(tiny.run(seed=seed, steps=3), workload="noisy") for seed in (0, 1)]
    first, second = (tiny.numbers(outcome) for outcome in serial(runs, resources))
    again = [tiny.numbers(outcome) for outcome in serial(runs[::-1], resources)]
    assert again == [second, first]


@pytest.mark.usefixtures("restored")
def test_runs_of_two_threads_do_not_disturb_each_other(alone: Any) -> None:
    """The second begins while the first is in the middle, with other settings."""
    begun, found = threading.Event(), []

    def batch(seed: int, step: int) -> Any:
        if step == 1:
            torch.set_default_dtype(torch.float64)
            begun.set()
            second.join(0.2)  # it would end in this time, if it did not wait
        return tiny.batch(seed, step)

    def run_another() -> None:
        begun.wait()
        found.extend(serial([tiny.run(steps=4)], Resources()))

    before = state()
    second = threading.Thread(target=run_another)
    second.start()
    spoiling = dataclasses.replace(tiny.plain, name="spoiling", batch=batch)
    run = dataclasses.replace(tiny.run(steps=4), workload="spoiling")
    list(serial([run], Resources({"spoiling": spoiling})))
    second.join()
    assert [tiny.numbers(outcome) for outcome in found] == [alone]
    after = state()
    assert {key for key in before if before[key] != after[key]} == set()


FILE = """
import os, sys
import torch
torch.set_default_dtype(torch.float64)
os.environ["TINY_SET"] = "by the file"
sys.path.insert(0, "/by/the/file")
import theodolite as th
from torch import nn

def build(width, depth):
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 2))

def batch(seed, step):
    assert os.environ["TINY_SET"] == "by the file"
    assert "/by/the/file" in sys.path
    assert torch.get_default_dtype() is torch.float64
    inputs = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
    assert inputs.dtype is torch.float64
    return inputs, (inputs.sum(1) > 0).long()

workload = th.Workload("own", build, batch, nn.functional.cross_entropy, size=th.Size(16, 2))
"""


def test_what_a_file_sets_when_it_is_imported_holds_for_its_runs_and_for_no_others(
    tmp_path: Path, alone: Any
) -> None:
    file = tmp_path / "own.py"
    file.write_text(FILE)
    own = dataclasses.replace(tiny.run(steps=4), workload=f"{file}:workload")
    before = state()
    outcomes = list(serial([own, tiny.run(steps=4), dataclasses.replace(own, seed=1), own], Resources()))
    after = state()
    assert [outcome.error for outcome in outcomes] == [None] * 4
    assert tiny.numbers(outcomes[1]) == alone
    assert tiny.numbers(outcomes[0]) == tiny.numbers(outcomes[3])
    assert {key for key in before if before[key] != after[key]} == set()


def test_a_function_that_imports_when_it_is_called_gets_the_module_beside_its_file(tmp_path: Path) -> None:
    for name, factor in (("first", 1), ("second", 2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "helper.py").write_text(f"FACTOR = {factor}\n")
        (tmp_path / name / "mine.py").write_text(LAZY)
    runs = [
        dataclasses.replace(tiny.run(steps=1), workload=f"{tmp_path / name}/mine.py:workload", seed=seed)
        for seed, name in enumerate(["first", "second", "first", "second"])
    ]
    outcomes = list(serial(runs, Resources()))
    assert [outcome.error for outcome in outcomes] == [None] * 4
    # Two layers: 8 inputs, a hidden layer, 2 outputs, with biases.
    sizes = [8 * hidden + hidden + 2 * hidden + 2 for hidden in (16, 32)] * 2
    assert [outcome.readings["parameters"] for outcome in outcomes] == sizes


def test_a_sweep_leaves_nothing_of_what_its_file_has_set(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(FILE)
    before = state()
    made = th.sweep(
        f"{tmp_path}/own.py:workload",
        widths=[8],
        lr=[0.01],
        seeds=1,
        parameterization="standard",
        steps=1,
        held_out=1,
        engine="serial",
        out=tmp_path / "out",
    )
    after = state()
    assert made.report is not None
    assert made.report.ok
    # Packages that the analysis imports add filters of warnings.
    assert {key for key in before if before[key] != after[key]} <= {"warnings"}


LAZY = """
import theodolite as th
from torch import nn, randn, zeros

def build(width, depth):
    from helper import FACTOR
    hidden = FACTOR * width
    return nn.Sequential(nn.Linear(8, hidden), nn.ReLU(), nn.Linear(hidden, 2))

def batch(seed, step):
    return randn(16, 8), zeros(16).long()

workload = th.Workload("lazy", build, batch, nn.functional.cross_entropy, size=th.Size(16, 2))
"""


def test_a_process_in_which_nothing_was_set_has_the_standard_settings() -> None:
    unlike = {
        name: setting.read()
        for name, setting in _SETTINGS.items()
        if setting.standard is not _CALLERS and setting.read() != setting.standard
    }
    assert unlike == {}
    assert len(_SETTINGS) > 30
