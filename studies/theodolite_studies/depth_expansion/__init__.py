"""What is left of the signal for one more block as a network gets deeper, and does width help to see it?

ResNets of 6n + 2 layers on CIFAR-10, n from 1 to 9 and 4 to 32 channels, trained on all images and to the
end on some.
"""

from theodolite_studies.framework.command import study_command

command = study_command(
    __name__,
    __doc__,
    *("part", "device"),
    small="Computed images, depths 1 and 3, widths 2 and 8: for a CPU.",
)
