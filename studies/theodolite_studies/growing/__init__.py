"""Blocks where the signal is strongest: are they better than elsewhere, and can a certificate be trusted?

A byte-level GPT on enwik8 that is grown in several ways at equal compute; the rank correlation of the signal
with what a block gains; how often certificates are wrong on a problem whose truth is known; and the power law
of successive growths. The part coverage is always on the CPU.
"""

from theodolite_studies.framework.command import study_command

command = study_command(
    __name__,
    __doc__,
    *("part", "device"),
    small="The built-in text, two blocks, some 40 steps: for a CPU.",
)
