"""Does the best learning rate stay from width 128 to 1024 and from depth 2 to 64, on enwik8?"""

from theodolite_studies.framework.command import study_command

command = study_command(
    __name__,
    __doc__,
    *("part", "device", "engine", "summary"),
    small="Widths 64 and 128, depths to 32, the built-in text: for a CPU.",
)
