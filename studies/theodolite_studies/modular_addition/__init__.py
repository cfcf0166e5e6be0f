"""How do networks learn to add modulo p: waves, the lottery of frequencies, and the stages of grokking?"""

from theodolite_studies.framework.command import study_command

command = study_command(__name__, __doc__, "part")
