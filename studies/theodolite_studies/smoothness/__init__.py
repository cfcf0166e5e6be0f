"""How does gradient-normalized smoothness grow on the way to a minimum?"""

from theodolite_studies.framework.command import study_command

command = study_command(__name__, __doc__, "part")
