"""The vocabulary of the tables: the kinds of tensor they are made of, and the sizes all of them share."""

from __future__ import annotations

from theodolite.anatomy.part import AttentionHeads, Norm, Role

from .table import Fact, Rows

VOCAB, CLASSES, HEAD, EXPERTS = 97, 10, 16, 4


def hidden(fan_in: int, fan_out: int, rows: Rows = ()) -> Fact:
    """nn.Linear between two widths: weight (out, in)."""
    return Fact((fan_out, fan_in), "linear", "hidden", (1,), (0,), "both", rows=rows)


def conv1d(fan_in: int, fan_out: int, rows: Rows = ()) -> Fact:
    """transformers' Conv1D (GPT-2), a Linear with weight (in, out)."""
    return Fact((fan_in, fan_out), "linear", "hidden", (0,), (1,), "both", rows=rows)


def experts(fan_in: int, fan_out: int, rows: Rows = ()) -> Fact:
    """A stack of expert matrices (experts, out, in)."""
    return Fact((EXPERTS, fan_out, fan_in), "linear", "hidden", (2,), (1,), "both", rows=rows)


def readout(fan_in: int, fan_out: int) -> Fact:
    """nn.Linear onto something that keeps its size: classes, vocabulary, experts, fixed heads."""
    return Fact((fan_out, fan_in), "linear", "output", (1,), (0,), "in")


def entry(fan_in: int, fan_out: int) -> Fact:
    """nn.Linear from the data, whose size stays, onto the width."""
    return Fact((fan_out, fan_in), "linear", "input", (1,), (0,), "out")


def lookup(
    count: int, d: int, tied: tuple[str, ...] = (), factor: float = 1.0, looked_up: float = 1.0
) -> Fact:
    """nn.Embedding (count, d). A tied head does not change it: the first use names the part.

    Of several that share it, the head is the last, and `factor` is a number that it is multiplied by;
    `looked_up` multiplies what is looked up.
    """
    head = {"tied": tied, "readout": tied[-1:], "factor": looked_up, "readout_factor": factor}
    return Fact((count, d), "embedding", "input", (0,), (1,), "out", **head)


def conv(fan_in: int, fan_out: int, kernel: int, role: Role = "hidden") -> Fact:
    """nn.Conv2d (out, in / groups, k, k)."""
    grows = {"hidden": "both", "input": "out"}[role]
    return Fact((fan_out, fan_in, kernel, kernel), "conv", role, (1, 2, 3), (0,), grows)


def bias(d: int, grows: bool = True, rows: Rows = (), tied: tuple[str, ...] = ()) -> Fact:
    """A vector that is added."""
    return Fact((d,), "add", "bias", (), (0,), "out" if grows else "neither", tied=tied, rows=rows)


def gain(
    *shape: int,
    read_by: tuple[str, ...] | str = (),
    reaches: str | None = None,
    grows: bool = True,
    offset: float = 0.0,
) -> Fact:
    """A vector that multiplies what a norm returns: Input-Norm if `read_by`, Output-Norm if it `reaches`."""
    readers = (read_by,) if isinstance(read_by, str) else read_by
    if bool(readers) == bool(reaches):
        raise ValueError("a gain is either read by weights only, or reaches something else")
    axes = tuple(range(len(shape)))
    norm: Norm = "input" if readers else "output"
    growth = "out" if grows else "neither"
    return Fact(shape, "norm", "gain", (), axes, growth, norm=norm, read_by=readers, offset=offset)


def layer_scale(d: int) -> Fact:
    """A vector that multiplies what is no norm's output."""
    return Fact((d,), "scale", "gain", (), (0,), "out")


def thirds(d: int) -> Rows:
    """Query, key and value one after the other."""
    return (((0, d),), ((d, 2 * d),), ((2 * d, 3 * d),))


def halves(d: int) -> Rows:
    """Gate and up one after the other."""
    return (((0, d),), ((d, 2 * d),))


def heads_of_thirds(d: int) -> Rows:
    """GPT-NeoX: head by head, and in each head query, key and value."""
    starts = range(0, 3 * d, 3 * HEAD)
    return tuple(tuple((s + i * HEAD, s + (i + 1) * HEAD) for s in starts) for i in range(3))


def softmax(scale: float = HEAD**-0.5) -> AttentionHeads:
    """Heads of fixed size, as nearly all builds here have them: the scale stays too."""
    return AttentionHeads(head_dim=HEAD, head_dim_grows=False, scale=scale, scale_at_double_width=scale)
