"""Is there a zone of positive curvature with biases, residual paths and norms, and does training like it?

LeNet-300-100, LeNet-5 and ResNet-4 in five variants on Fashion-MNIST and CIFAR-10.
"""

from theodolite_studies.framework.command import study_command

command = study_command(
    __name__,
    __doc__,
    *("part", "device", "engine", "change", "summary"),
    small="Two networks, 13 points, 500 images, 100 epochs, 2 seeds: for a CPU.",
)
