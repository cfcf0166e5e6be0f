"""Below the claims of the growing study: ways, correlations, certificates and exponents."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from theodolite_studies.framework.paired import paired
from theodolite_studies.framework.records import Record
from theodolite_studies.growing.claims import PARTS, losses, share
from theodolite_studies.growing.fits import HELD, envelope
from theodolite_studies.growing.ranking import (
    SIGNALS,
    VARIANTS,
    Correlation,
    correlation,
    in_two_orders,
    realised,
    together,
)


def notes(records: Sequence[Record]) -> str:
    """A table for each part that there are records of."""
    parts = {part: [one for one in records if one["part"] == part] for part in PARTS}
    tables = [
        *_grown(parts["growing"]),
        *_ranked(parts["ranking"]),
        *_covered(parts["coverage"]),
        *_enveloped(parts["envelope"]),
    ]
    return "\n\n".join(tables)


def _grown(records: Sequence[Record]) -> Iterator[str]:
    for added in sorted({one["added"] for one in records}):
        own = [one for one in records if one["added"] == added and one["way"] != "base"]
        rows: list[tuple[str, ...]] = [
            ("way", "at first", "at the end", "less none", "steps", "places by seed")
        ]
        none = losses(own, added, "none")
        for way in dict.fromkeys(one["way"] for one in own):
            end, first = losses(own, added, way), losses(own, added, way, "first")
            less = str(paired(end, none)) if way != "none" and end.keys() & none.keys() else "–"
            steps = sorted({one["steps"] for one in own if one["way"] == way})
            places = [one["places"] for one in own if one["way"] == way and "places" in one]
            rows.append(
                (
                    way,
                    f"{np.mean(list(first.values())):.4f}",
                    f"{np.mean(list(end.values())):.4f}",
                    less,
                    "–".join(str(each) for each in dict.fromkeys((steps[0], steps[-1]))),
                    " ".join(",".join(map(str, each)) for each in places) or "–",
                )
            )
        heading = (
            f"Held-out loss with {added} more blocks, when all have spent the same; p of each by itself:"
        )
        yield f"{heading}\n{_aligned(rows)}"


def _ranked(records: Sequence[Record]) -> Iterator[str]:
    if not records:
        return
    moments = sorted(int(moment) for moment in records[0]["gained"])
    columns = [(variant, moment) for variant in VARIANTS for moment in moments]
    gained = {each: realised(records, *each, "gained") for each in columns}
    rows: list[tuple[str, ...]] = [("trained", *(variant for variant, _ in columns))]
    rows.append(("after steps", *(str(moment) for _, moment in columns)))
    for name, words in SIGNALS.items():
        signals = {variant: realised(records, variant, moments[0], name) for variant in VARIANTS}
        found = [correlation(together(signals[each[0]], gained[each])) for each in columns]
        rows.append((words, *map(_over_points, found)))
    agreed = [correlation(in_two_orders(records, *each)) for each in columns]
    rows.append(("another order of data", *map(_over_points, agreed)))
    means = [np.mean([each.mean() for each in gained[column].values()]) for column in columns]
    spreads = [np.mean([each.std(ddof=1) for each in gained[column].values()]) for column in columns]
    rows.append(("gained, mean ± spread over points", *map("{:+.4f} ± {:.4f}".format, means, spreads)))
    heading = (
        "Rank correlation of what a block gained with what was known before. The intervals are over the\n"
        f"points of these {len(gained[columns[0]])} networks, as if points were independent, which "
        "neighbours are not; they say nothing\nof other networks:"
    )
    yield f"{heading}\n{_aligned(rows)}"


def _over_points(found: Correlation) -> str:
    low, high = found.over_points
    return f"{found.value:+.2f} ({low:+.2f} to {high:+.2f})"


def _covered(records: Sequence[Record]) -> Iterator[str]:
    if not records:
        return
    rows: list[tuple[str, ...]] = [
        (
            "splits",
            "to gain",
            "bound by",
            "tries",
            "issued",
            "wrong",
            "95 %",
            "bound > truth",
            "bound",
            "truth",
        )
    ]
    for one in records:
        part, low, high = share(one["wrong"], one["repetitions"])
        rows.append(
            (
                one["splits"],
                one["regime"],
                one["method"],
                str(one["repetitions"]),
                f"{100 * one['issued'] / one['repetitions']:.1f} %",
                f"{100 * part:.2f} %",
                f"{100 * low:.2f} to {100 * high:.2f} %",
                f"{100 * one['above'] / one['repetitions']:.2f} %",
                f"{one['lower']:.4f}",
                f"{one['truth']:.4f}",
            )
        )
    yield f"Certificates; wrong ones are shares of all tries:\n{_aligned(rows)}"


def _enveloped(records: Sequence[Record]) -> Iterator[str]:
    grown = [one for one in records if one["kind"] in ("grown", "alone") and one["loss"] is not None]
    if grown:
        rows: list[tuple[str, ...]] = [("steps", "blocks", "grown", "one block", "gain of the next")]
        for steps in sorted({one["steps"] for one in grown}):
            both = [
                [one for one in grown if one["steps"] == steps and one["kind"] == kind]
                for kind in ("grown", "alone")
            ]
            rows.append(
                (
                    str(steps),
                    str(both[0][0]["depth"]) if both[0] else "–",
                    *(f"{np.mean([one['loss'] for one in own]):.4f}" if own else "–" for own in both),
                    f"{np.mean([one['gain'] for one in both[0]]):.2g}" if both[0] else "–",
                )
            )
        yield f"One block after the other:\n{_aligned(rows)}"
    found = envelope(records)
    if found is not None:
        in_depth = f"{1 / (found.s.value - 1):.4g}; of a power law {found.in_depth}"
        lines = [
            f"s                                    {found.s}",
            f"E, what is left at any depth         {found.floor}",
            f"exponent in depth, 1/(s − 1)         {in_depth}",
            f"exponent in parameters, foretold     {found.foretold}",
        ]
        if found.measured is not None:
            lines.append(f"exponent in parameters, from scratch {found.measured}")
        if found.coupling is not None:
            lines.append(f"slope of log gain by log excess loss {found.coupling:.3g}")
        if (alone := found.alone) is not None:
            lines += [
                f"s of one block for the same steps    {alone.s}",
                f"exponent that it would foretell      {alone.foretold}",
            ]
        if found.rivals is not None:
            lines.append(f"held-out error, grown                {found.rivals}")
        if found.alone is not None and found.alone.rivals is not None:
            lines.append(f"held-out error, one block            {found.alone.rivals}")
        lines.append(
            f"Held-out errors are of log loss at the last {HELD} stages, by fits to the others, by seed.\n"
            "One block that trains on gains no depth. Where its s cannot be told from that of the network\n"
            "that grows, what is fitted may be training time."
        )
        yield "\n".join(["Exponents:", *lines])


def _aligned(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
