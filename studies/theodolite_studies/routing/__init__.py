"""Do diffusion transformers show three symptoms of depth, along time too, and does routing cure them?

The stream inflates, gradients fall along depth, and neighbouring blocks become alike. A network on
Fashion-MNIST with a residual stream, with routing, and with routing that depends on the denoising time.
"""

from theodolite_studies.framework.command import study_command

command = study_command(
    __name__,
    __doc__,
    *("part", "device"),
    small="64 wide and 6 blocks deep, 150 steps, two seeds: for a CPU.",
)
