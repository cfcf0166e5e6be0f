"""Is a schedule that was refined from the gradient norms of a first run a better one?"""

from theodolite_studies.framework.command import study_command

command = study_command(__name__, __doc__, "part")
