"""Below the claims of the depth-expansion study: networks, what the signal follows, and the bound."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from theodolite_studies.depth_expansion.values import (
    POINTS,
    Array,
    Grid,
    Value,
    best_gain,
    coherence,
    effective,
    explained_by,
    failures,
    grids,
    norm,
    slopes,
)
from theodolite_studies.framework.records import Record


def notes(records: Sequence[Record]) -> str:
    """Tables for each regime."""
    said = [part(grid) for grid in grids(records) for part in (_networks, _followed, _correlated, _aligned)]
    diverged = sum("diverged" in one for one in records)
    said.append(f"{diverged} networks diverged and are left out." if diverged else "")
    return "\n\n".join(each for each in said if each)


def _networks(grid: Grid) -> str:
    rows: list[tuple[str, ...]] = [
        ("network", "train loss", "test loss", "right", "‖v‖ train", "test", "/√trΣ train", "test", "gain")
    ]
    values: tuple[Value, ...] = (
        lambda one: one["train_loss"],
        lambda one: one["test_loss"],
        lambda one: one["test_right"],
        norm("train"),
        norm("test"),
        coherence("train"),
        coherence("test"),
        best_gain,
    )
    for width in grid.widths:
        for depth in grid.depths:
            found = [grid.of(depth, width, value) for value in values]
            shown = [f"{found[0].mean():.4f}", _spread(found[1]), f"{found[2].mean():.1%}"]
            shown += [f"{each.mean():.2g}" for each in found[3:]]
            rows.append((f"width {width} n {depth}", *shown))
    heading = (
        f"{grid.regime}: means over seeds {_listed(grid.seeds)}, ± their standard deviation; share of test\n"
        "images right; the mean gradient before the readout, and in units of one image's spread; the\n"
        "largest tr(MS⁻¹Mᵀ) of one more block, on test images:"
    )
    return f"{heading}\n{_columns(rows)}"


def _followed(grid: Grid) -> str:
    """Does the norm read anything but the train loss?"""
    rows: list[tuple[str, ...]] = [
        ("log of", "on log n", "log width", "log train loss", "R²", "R² of the train loss alone")
    ]

    def loss(one: Record) -> float:
        return one["train_loss"]

    for name, value in (
        ("‖v‖ train", norm("train")),
        ("‖v‖ test", norm("test")),
        ("‖v‖/√trΣ train", coherence("train")),
        ("‖v‖/√trΣ test", coherence("test")),
    ):
        alone, given = slopes(grid, value), slopes(grid, value, loss)
        rows.append(
            (
                name,
                *(_spread(alone[key]) for key in ("depth", "width")),
                "",
                _spread(alone["explained"]),
                _spread(explained_by(grid, value, loss)),
            )
        )
        keys = ("depth", "width", "given 0", "explained")
        rows.append(("  given the loss", *(_spread(given[key]) for key in keys), ""))
    alone = slopes(grid, loss)
    rows.append(
        ("train loss", _spread(alone["depth"]), _spread(alone["width"]), "", _spread(alone["explained"]), "")
    )
    bias = np.median(grid.over(lambda one: norm("train")(one) / one["train_bias"]))
    heading = (
        f"{grid.regime}: slopes over all networks, with the train loss held and without. The mean gradient\n"
        f"before the readout is Wᵀ∇_b L; its norm is {bias:.2g} × that of the bias's gradient (median):"
    )
    return f"{heading}\n{_columns(rows)}"


def _correlated(grid: Grid) -> str:
    rows: list[tuple[str, ...]] = [
        ("deepest network", "point", "channels", "|r| median", "90 %", "99 %", "> 2/√N", "C", "noise")
    ]
    depth = grid.depths[-1]
    for width in grid.widths:
        for point in POINTS:
            pairs = [one["points"][point]["pairs"] for one in grid.records if _is(one, depth, width)]
            pairs = [each for each in pairs if each["near"] is not None]
            if not pairs:
                continue
            quantiles = np.mean([each["quantiles"] for each in pairs], axis=0)
            rows.append(
                (
                    f"width {width} n {depth}",
                    point,
                    f"{pairs[0]['alive']}",
                    *(f"{value:.3f}" for value in quantiles),
                    f"{np.mean([each['beyond'] for each in pairs]):.0%}",
                    f"{grid.of(depth, width, effective(point)).mean():.1f}",
                    f"{np.mean([each['edge'] for each in pairs]):.2f}",
                )
            )
    heading = (
        f"{grid.regime}: correlations of gradients over images; C = λ_max/(trΣ/d), and what it would be\n"
        "of as many vectors of uncorrelated coordinates of one variance:"
    )
    return f"{heading}\n{_columns(rows)}"


def _aligned(grid: Grid) -> str:
    sizes = grid.records[0]["points"]["pool"]["alignment"]["sizes"]
    rows: list[tuple[str, ...]] = [("deepest network", "point", "", *(f"{size}" for size in sizes))]
    depth = grid.depths[-1]
    for width in (grid.widths[0], grid.widths[-1]):
        for point in POINTS:
            for name, title in (("fresh", "test, test"), ("crossed", "train, test"), ("bound", "bound")):
                shares = [grid.of(depth, width, failures(point, name, size)).mean() for size in sizes]
                first = (f"width {width} n {depth}", point) if name == "fresh" else ("", "")
                rows.append((*first, title, *(f"{share:.3f}" for share in shares)))
    heading = f"{grid.regime}: how often mean gradients of two samples do not align, by the samples' size:"
    return f"{heading}\n{_columns(rows)}"


def _is(one: Record, depth: int, width: int) -> bool:
    return one["depth"] == depth and one["width"] == width


def _spread(values: Array) -> str:
    if len(values) < 2:
        return f"{values.mean():.3f}"
    return f"{values.mean():.3f} ± {values.std(ddof=1):.3f}"


def _listed(seeds: Sequence[int]) -> str:
    return ", ".join(map(str, seeds))


def _columns(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
