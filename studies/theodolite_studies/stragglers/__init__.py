"""Does sequential gradient coding save time where workers are late now and then?"""

from theodolite_studies.framework.command import study_command

command = study_command(__name__, __doc__, "part")
