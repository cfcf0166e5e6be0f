"""Does one network that jumps replace many steps of a sampler, and which self-distillation loss is best?

Flow maps of a mixture whose exact map is known, on a CPU; and of Fashion-MNIST, for a GPU.
"""

from theodolite_studies.framework.command import study_command

command = study_command(
    __name__,
    __doc__,
    *("part", "device"),
    small="The mixture alone, 200 steps, 2 seeds: two minutes.",
)
