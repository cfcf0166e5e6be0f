"""Does manifold projection beat a re-tuned scale of guidance? Does a bound predict if inversion works?"""

from theodolite_studies.framework.command import study_command

command = study_command(__name__, __doc__, "part")
