"""Is diffGrad better than Adam, and than Adam at half the learning rate?"""

from theodolite_studies.framework.command import study_command

command = study_command(__name__, __doc__, "part")
