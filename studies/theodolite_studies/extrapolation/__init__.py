"""Do width, data and mirrored flows lower the error at gaps between two cylinders that training left out?"""

from theodolite_studies.framework.command import study_command

command = study_command(__name__, __doc__, "part")
