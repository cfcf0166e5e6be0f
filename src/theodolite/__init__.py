"""Theodolite surveys a neural network before somebody pays to make it bigger.

>>> import theodolite as th
>>> th.Size(width=256, depth=4)
Size(width=256, depth=4)
"""

from __future__ import annotations

import importlib
import random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from theodolite import (
        controllers,
        data,
        fits,
        fleet,
        flows,
        growing,
        models,
        optimizers,
        probes,
        surgery,
        workloads,
    )
    from theodolite.anatomy import Anatomy, AnatomyError, Part, UnclassifiedError, dissect
    from theodolite.core.errors import UseError
    from theodolite.core.size import Size
    from theodolite.forecasting.forecast import forecast
    from theodolite.forecasting.result import Forecast
    from theodolite.growing.grow import grow
    from theodolite.growing.grown import Grown
    from theodolite.launching.scale import scale
    from theodolite.launching.sheet import LaunchSheet
    from theodolite.lr_finder import LrRange, find_lr
    from theodolite.planning import Groups, Plan, groups, plan
    from theodolite.surveying.auditing.audit import audit
    from theodolite.surveying.auditing.report import Audit
    from theodolite.surveying.finding import Finding
    from theodolite.surveying.survey import Survey, survey
    from theodolite.sweeping.result import Sweep
    from theodolite.sweeping.sweep import sweep
    from theodolite.workloads import Workload, workload

__version__ = "0.1.0"

__all__ = [
    # what is trained
    "Size",
    "Workload",
    "workload",
    "workloads",
    "data",
    "models",
    # what is in the network
    "Anatomy",
    "AnatomyError",
    "Part",
    "UnclassifiedError",
    "dissect",
    # how each tensor is to be trained at another size
    "Plan",
    "plan",
    # which optimizer trains which tensor
    "Groups",
    "groups",
    # is a parameterization written by hand right
    "Audit",
    "audit",
    # how it is trained
    "optimizers",
    "controllers",
    # which base hyperparameters, and do they transfer
    "Sweep",
    "sweep",
    "fleet",
    # all of it, from a small network to the launch of a large one
    "LaunchSheet",
    "scale",
    # which learning rates can be used
    "LrRange",
    "find_lr",
    # what the loss does at the next scale
    "fits",
    "Forecast",
    "forecast",
    # flows from noise to data: training, sampling, guidance
    "flows",
    # what can be measured
    "probes",
    # how it can be changed and stay the same function
    "surgery",
    # would one more block help
    "Grown",
    "grow",
    "growing",
    # what is wrong with it
    "Finding",
    "Survey",
    "survey",
    # errors of use
    "UseError",
]

# Loaded at first use, so that `import theodolite` and `theodolite --help` do not import torch.
_HOMES = {
    "Anatomy": "anatomy",
    "AnatomyError": "anatomy",
    "Audit": "surveying",
    "Finding": "surveying",
    "Forecast": "forecasting",
    "Groups": "planning",
    "Grown": "growing",
    "LaunchSheet": "launching",
    "LrRange": "lr_finder",
    "Part": "anatomy",
    "Plan": "planning",
    "Size": "core.size",
    "Survey": "surveying",
    "Sweep": "sweeping",
    "UnclassifiedError": "anatomy",
    "UseError": "core.errors",
    "Workload": "workloads",
    "audit": "surveying",
    "controllers": None,
    "data": None,
    "dissect": "anatomy",
    "find_lr": "lr_finder",
    "fits": None,
    "fleet": None,
    "forecast": "forecasting",
    "flows": None,
    "groups": "planning",
    "grow": "growing",
    "growing": None,
    "models": None,
    "optimizers": None,
    "plan": "planning",
    "probes": None,
    "scale": "launching",
    "surgery": None,
    "survey": "surveying",
    "sweep": "sweeping",
    "workload": "workloads",
    "workloads": None,
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'theodolite' has no attribute {name!r}")
    home = _HOMES[name]
    state = random.getstate()  # rich draws a number when it is imported, which is nobody's to miss
    try:
        module = importlib.import_module(f"theodolite.{home or name}")
    finally:
        random.setstate(state)
    if home is None:
        return module
    value = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
