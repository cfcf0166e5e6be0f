"""What is trained: `Workload`, the built-in ones by name, and the user's own."""

from theodolite.calling import Build, call, logits
from theodolite.workloads.builtin import built_in, next_token_loss
from theodolite.workloads.definition import Batch, Workload
from theodolite.workloads.hugging_face import config_size
from theodolite.workloads.lookup import workload

__all__ = [
    "Batch",
    "Build",
    "Workload",
    "built_in",
    "call",
    "config_size",
    "logits",
    "next_token_loss",
    "workload",
]
