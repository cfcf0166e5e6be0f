"""What is trained: `Workload`, the built-in ones by name, and the user's own."""

from theodolite.workloads.definition import Batch, Build, Workload, call, logits

__all__ = ["Batch", "Build", "Workload", "call", "logits"]
