"""What is trained: `Workload`, the built-in ones by name, and the user's own."""

from theodolite.core.calling import ModelLoss, OutputLoss
from theodolite.workloads.builtin import built_in, next_token_loss
from theodolite.workloads.definition import Workload
from theodolite.workloads.lookup import config_size, workload

__all__ = ["ModelLoss", "OutputLoss", "Workload", "built_in", "config_size", "next_token_loss", "workload"]
