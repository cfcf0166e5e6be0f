"""Norms before, after or around the branches: how do stream and gradients grow, and how stable is it?

A byte-level GPT on enwik8 over depths 4 to 32 and six learning rates, with the plan and without.
"""

from theodolite_studies.framework.command import study_command

command = study_command(
    __name__,
    __doc__,
    *("part", "device"),
    small="The built-in text, depths 4 and 12, 60 steps: for a CPU.",
)
