"""Does a trained network need fewer iterations than conjugate gradients? And than multigrid?"""

from theodolite_studies.framework.command import study_command

command = study_command(
    __name__, __doc__, "part", small="Two widths, one seed and 60 steps: to see how it goes."
)
