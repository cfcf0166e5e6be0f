"""Do the principal flow and the modified flow of games follow steps where plain flows do not?"""

from theodolite_studies.framework.command import study_command

command = study_command(__name__, __doc__, "part")
