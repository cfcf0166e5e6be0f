"""Does the principal flow follow gradient descent where the gradient flow does not?"""

from theodolite_studies.framework.command import study_command

command = study_command(__name__, __doc__, "part")
