"""Does NC1 fall along the central path and over depth, and which decay lowers it more?"""

from theodolite_studies.framework.command import study_command

command = study_command(__name__, __doc__, "part")
