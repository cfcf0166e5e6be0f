"""What stops a section, as a Finding."""

from __future__ import annotations

from theodolite.anatomy import UnclassifiedError
from theodolite.core.building import in_one_line
from theodolite.surveying.finding import Finding

WHY_RULED = (
    "Learning rate, decay and initialisation at a larger size follow from what a tensor does: whether it "
    "reads or writes the width, multiplies, or is added. A tensor outside every role would be scaled by "
    "guesswork, and one wrong tensor is enough to move the optimum."
)


def unruled(error: UnclassifiedError) -> Finding:
    """TH107: a tensor that cannot be classified."""
    return Finding(
        "TH107",
        "fail",
        "Parameters outside any rule",
        f"The network could not be dissected. {' '.join(str(error).split())}",
        why=WHY_RULED,
        remedy="Say what the tensor is, as the message asks: survey(…, roles={pattern: role}), or in a "
        "terminal --role pattern=role. Until then the findings that rest on the anatomy are missing here.",
    )


def crashed(title: str, error: Exception) -> Finding:
    """TH001: a section that failed."""
    return Finding(
        "TH001",
        "error",
        "A check that could not be made",
        f"“{title}” could not be examined: {in_one_line(error)}",
        why="A check that did not run has neither passed nor failed: it says nothing of the network. The "
        "other sections are not affected.",
        remedy="Please report it, together with the model's code, unless the message points to your model.",
    )
