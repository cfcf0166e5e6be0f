"""Figures of the signal, against depth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from scipy.special import ndtr

from theodolite.core.files import plain
from theodolite.present.figure import ACCENT, FAINT, QUIET, Figure, Panel, frame
from theodolite.probes.signal.gradient_covariance import BINS

if TYPE_CHECKING:
    from theodolite.probes.signal.gradient_covariance import Covariance
    from theodolite.probes.signal.signal import Signal


def signal_figure(signal: Signal) -> Figure:
    """Gains with their errors, the stream's gradient, and correlations of its channels at the best point."""
    names = [one.name for one in signal.points]
    best = signal.best
    panels = [
        _dots(
            "Gain along −M",
            names,
            [one.gain for one in signal.points],
            [signal.threshold * one.error for one in signal.points],
        ),
        _dots(
            "Gain, preconditioned",
            names,
            [one.preconditioned for one in signal.points],
            [signal.threshold * one.preconditioned_error for one in signal.points],
        ),
        _dots("Mean gradient of the stream, ‖v‖", names, [one.gradient for one in signal.points]),
        histogram(f"Correlations of channels at {best.name}", best.covariance),
    ]
    if best.covariance.matrix is not None:
        panels.append(heat_map(f"Covariance of channels at {best.name}", best.covariance))
    said = "No point has a gain above its noise" if signal.deepest else f"The largest gain is at {best.name}"
    return Figure(
        caption="How fast the loss would fall at first along the best direction of a block at each point, on "
        f"held-out units; bars are {signal.threshold:.2f} standard errors. Then the gradient of the "
        "stream, and how its channels are correlated over units; the line is what chance alone gives.",
        alt=f"{said}. Gains from the first point to the last: "
        + ", ".join(f"{one.gain:.3g}" for one in signal.points),
        panels=tuple(panels),
    )


def histogram(title: str, covariance: Covariance) -> Panel:
    """How the correlations of channels are distributed, beside those of channels without any."""
    edge = 1 / BINS
    middles = [2 * (at + 0.5) / BINS - 1 for at in range(BINS)]
    total = max(sum(covariance.counts), 1)
    reached = max((abs(x) for x, count in zip(middles, covariance.counts, strict=True) if count), default=0.0)
    bars = {
        "type": "bar",
        "x": middles,
        "y": [count / total for count in covariance.counts],
        "marker": {"color": ACCENT, "line": {"width": 0}},
        "hovertemplate": "%{x:.3f}: %{y:.3f}<extra></extra>",
    }
    noise = covariance.units**-0.5
    curve = {
        "type": "scatter",
        "mode": "lines",
        "x": middles,
        "y": [_normal(x - edge, x + edge, noise) for x in middles],
        "line": {"color": QUIET, "width": 1, "dash": "dot"},
        "hoverinfo": "skip",
    }
    layout = frame(height=220)
    layout["bargap"] = 0
    reach = min(1.0, max(reached, 3 * noise) + 4 * edge)
    layout["xaxis"] |= {"title": {"text": "correlation", "standoff": 6}, "range": [-reach, reach]}
    layout["yaxis"] |= {"rangemode": "tozero", "nticks": 4, "tickformat": ".0%"}
    return Panel(title, (bars, curve), layout)


def heat_map(title: str, covariance: Covariance) -> Panel:
    """A covariance matrix."""
    assert covariance.matrix is not None
    largest = float(covariance.matrix.abs().max()) or 1.0
    drawn = {
        "type": "heatmap",
        "z": covariance.matrix.tolist(),
        "zmin": -largest,
        "zmax": largest,
        "colorscale": "RdBu",
        "colorbar": {"thickness": 10, "outlinewidth": 0, "exponentformat": "power", "nticks": 3},
        "hovertemplate": "channels %{x} and %{y}: %{z:.3g}<extra></extra>",
    }
    layout = frame(height=260)
    layout["xaxis"] |= {"title": {"text": "channel", "standoff": 6}}
    layout["yaxis"] |= {"autorange": "reversed"}
    return Panel(title, (drawn,), layout)


def _dots(title: str, names: Sequence[str], y: Sequence[float], errors: Sequence[float] = ()) -> Panel:
    points: dict[str, Any] = {
        "type": "scatter",
        "mode": "markers" if errors else "lines+markers",
        "x": list(names),
        "y": plain(list(y)),
        "marker": {"color": ACCENT, "size": 7},
        "line": {"color": ACCENT, "width": 2},
        "hovertemplate": "%{x}: %{y:.3g}<extra></extra>",
    }
    if errors:
        points["error_y"] = {"type": "data", "array": plain(list(errors)), "color": QUIET, "thickness": 1}
    layout = frame(height=220)
    layout["xaxis"] |= {"type": "category", "nticks": 8}
    layout["yaxis"] |= {
        "rangemode": "tozero",
        "nticks": 5,
        "exponentformat": "power",
        "zeroline": True,
        "zerolinecolor": FAINT,
    }
    return Panel(title, (points,), layout)


def _normal(low: float, high: float, spread: float) -> float:
    """The probability of a normal number between two."""
    return float(ndtr(high / spread) - ndtr(low / spread))
