"""Do stream, branches and logits keep their size from width 64 to 1024 and from depth 2 to 32?"""

from theodolite_studies.framework.command import study_command

command = study_command(
    __name__, __doc__, *("part", "device"), small="Widths up to 192 and depths up to 8, two seeds."
)
