"""Do scale vectors help training, which of them may decay, and do three changes make them better?

A byte-level GPT on enwik8, compared seed by seed; and the gradient flow of a scale vector, in float64.
"""

from theodolite_studies.framework.command import study_command

command = study_command(
    __name__,
    __doc__,
    *("part", "device", "engine", "summary"),
    small="20 steps on the built-in text, two seeds: for a CPU.",
)
