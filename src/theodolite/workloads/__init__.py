"""What is trained: `Workload`, the built-in ones by name, and the user's own."""

from theodolite.core.calling import ModelLoss, OutputLoss
from theodolite.workloads.builtin import built_in, next_token_loss
from theodolite.workloads.definition import Workload
from theodolite.workloads.lookup import config_size, workload
from theodolite.workloads.metrics import StepsTo
from theodolite.workloads.modular import grokking, modular_addition

__all__ = [
    "ModelLoss",
    "OutputLoss",
    "StepsTo",
    "Workload",
    "built_in",
    "config_size",
    "grokking",
    "modular_addition",
    "next_token_loss",
    "workload",
]
