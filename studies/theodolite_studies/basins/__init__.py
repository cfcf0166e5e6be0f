"""Large and small batches: one basin? And what do data and width do to the spectrum of the Hessian?"""

from theodolite_studies.framework.command import study_command

command = study_command(__name__, __doc__, "part")
