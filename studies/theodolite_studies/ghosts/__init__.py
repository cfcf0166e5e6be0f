"""Does training collapse where a step leaves the radius of convergence of the loss?"""

from theodolite_studies.framework.command import study_command

command = study_command(__name__, __doc__, "part")
