"""Does Lion keep every weight within 1/λ, and does its Lyapunov function decrease?"""

from theodolite_studies.framework.command import study_command

command = study_command(__name__, __doc__, "part")
