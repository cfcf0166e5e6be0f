"""Which scale vectors are shared by linear maps, and are they balanced with the columns they scale?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from theodolite.anatomy.names import starred_name
from theodolite.anatomy.specimen import examine_built
from theodolite.core.errors import UseError
from theodolite.present.text import counted, listed
from theodolite.probes.gains.scale_vectors import ScaledMap, ScaleVector, find_maps, find_vectors
from theodolite.surgery.edits import scaled_weights
from theodolite.surgery.fold_map import prefix_of
from theodolite.surgery.gains import find_gains
from theodolite.surveying.context import SurveyContext
from theodolite.surveying.finding import Check, Finding, Value, rounded
from theodolite.surveying.section import Section

SHARED = Check(
    "TH511",
    "Shared gains",
    "A gain that only linear maps read does not change what they can compute: it preconditions them. It "
    "multiplies the gradient of column j by γ_j² and adds a step along the column itself. Maps that share a "
    "gain share one preconditioner, although their gradients differ. Surgery can give each its own, without "
    "changing the function, and at no cost once it is folded back.",
)
BALANCE = Check(
    "TH512",
    "Balance of gains and columns",
    "A gradient step moves column j of the effective matrix W·diag(γ) by γ_j²I + w_j w_jᵀ times its "
    "gradient: γ_j² across the column and γ_j² + ‖w_j‖² along it. If ‖w_j‖² is far larger, columns change "
    "their length much faster than their direction. If it is far smaller, the gain hardly learns and only "
    "scales the learning rate. Gradient flow conserves γ_j² − ‖w_j‖².",
)
LOPSIDED = 1000.0
"""Factor by which ‖w_j‖² and γ_j² may differ. Usual initialisations give 1 to 100."""
MOST_PARAMETERS = 250_000_000
"""A gigabyte in float32. Columns of larger networks are not examined."""


def examine(context: SurveyContext) -> Iterator[Finding]:
    """TH511, and TH512 if there are vectors."""
    # Hollow, unless control flow depends on values.
    model = examine_built(context.workload.build, context.size, context.inputs).model
    try:
        maps = find_maps(model, context.inputs)
    except UseError:
        left = _immovable(context, model, ())
        yield SHARED.finding(
            "ok", left or "No gain of a norm is read by linear maps alone, so none is shared."
        )
        return
    own = {name for name, (_, vectors) in scaled_weights(model).items() if vectors.inputs}
    yield shared([one for one in maps if one.weight not in own], len(own), _immovable(context, model, maps))
    if sum(tensor.numel() for tensor in model.parameters()) <= MOST_PARAMETERS:
        model = context.build()
        vectors = [one for one in find_vectors(model, find_maps(model, context.inputs)) if not one.obstacle]
        if vectors:
            yield balance(vectors)


def shared(maps: Sequence[ScaledMap], num_own: int = 0, left: str = "") -> Finding:
    """TH511: gains that several linear maps read.

    `num_own` further maps have vectors of their own; `left` is a sentence on gains that cannot be moved.
    """
    readers: dict[str, list[ScaledMap]] = {}
    for one in maps:
        readers.setdefault(one.place.name, []).append(one)
    # q, k and v of one fused tensor are three maps.
    counts = {gain: sum(len(one.reader.shape.rows) for one in mine) for gain, mine in readers.items()}
    several = [gain for gain, count in counts.items() if count > 1]
    if not several:
        total = len(counts) + num_own
        said = (
            f"{counted(total, 'linear map')} {'reads' if total == 1 else 'read'} a norm, and no two share a "
        )
        return SHARED.finding("ok", f"{said}scale vector. {left}".rstrip())
    total = sum(counts[gain] for gain in several)
    return SHARED.finding(
        "note",
        f"{counted(len(several), 'gain')} {'is' if len(several) == 1 else 'are'} shared by {total} linear "
        f"maps, each of which could have its own. {left}".rstrip(),
        title="Gains shared by several linear maps",
        remedy="th.surgery.scale_vectors(model, inputs) gives each map its own vector on both sides; "
        "th.surgery.fold folds them into the weights after training. Try whether it helps: the scale-vector "
        "paper says so, but on a small GPT the benefit was not clear.",
        numbers={"gains": len(counts), "shared": len(several), "maps that share": total},
        rows=list(_shared_rows(readers, counts)),
    )


def balance(vectors: Sequence[ScaleVector]) -> Finding:
    """TH512: columns whose gain is much smaller or larger than them."""
    ratios = {one.name: _ratio(one) for one in vectors}
    known = {name: ratio for name, ratio in ratios.items() if ratio is not None}
    far = {name: ratio for name, ratio in known.items() if not 1 / LOPSIDED <= ratio <= LOPSIDED}
    numbers: dict[str, Value] = {"vectors": len(vectors), "far from balance": len(far)}
    if not known:
        return BALANCE.finding(
            "ok", "All gains, or the columns they scale, are zero: there is no balance yet.", numbers=numbers
        )
    numbers |= {"smallest ‖w‖²/γ²": min(known.values()), "largest ‖w‖²/γ²": max(known.values())}
    if not far:
        span = " to ".join(dict.fromkeys((rounded(min(known.values())), rounded(max(known.values())))))
        return BALANCE.finding(
            "ok",
            f"‖w_j‖² is {span} times γ_j² (median of each scale vector): both learn.",
            numbers=numbers,
        )
    large, small = ([name for name, ratio in far.items() if (ratio > 1) is over] for over in (True, False))
    said = [
        f"‖w_j‖² is up to {rounded(max(far.values()))} times γ_j² in {listed(large)}" if large else "",
        f"γ_j² is up to {rounded(1 / min(far.values()))} times ‖w_j‖² in {listed(small)}" if small else "",
    ]
    return BALANCE.finding(
        "note",
        f"{'; '.join(each for each in said if each)}.",
        title="Gains out of balance with their columns",
        remedy="Initialise gain and weights at comparable sizes: th.surgery.fold multiplies the gain into "
        "the weights and sets it to one, which changes the ratio but not the function. th.probes."
        "preconditioning gives the numbers of every column.",
        numbers=numbers,
        rows=[{"scale vector": name, "‖w‖²/γ²": ratio} for name, ratio in far.items()],
    )


def _immovable(context: SurveyContext, model: nn.Module, maps: Sequence[ScaledMap]) -> str:
    """A sentence on gains that only linear maps read, but that cannot be moved into them, with a reason."""
    found = {one.place.name for one in maps}
    parts = tuple(prefix_of(name) for name in found)  # of gains that surgery has made of a magnitude
    gains = [part.name for part in context.anatomy.trained if part.norm == "input" and part.op == "norm"]
    missing = [name for name in gains if name not in found and not name.startswith(parts)]
    why = find_gains(model, context.inputs).left if missing else {}
    names = [name for name in missing if name in why]
    if not names:
        return ""
    more = f"; and {len(names) - 1} more" if len(names) > 1 else ""
    return (
        f"{counted(len(names), 'gain')} that only linear maps read cannot be moved into them: {names[0]}, "
        f"because {why[names[0]]}{more}."
    )


def _ratio(one: ScaleVector) -> float | None:
    """The median of ‖w_j‖²/γ_j²; None if all columns or all gains are zero."""
    there = (one.gain_squares > 0) & (one.weight_squares > 0)
    return float((one.weight_squares[there] / one.gain_squares[there]).median()) if there.any() else None


def _shared_rows(readers: dict[str, list[ScaledMap]], counts: dict[str, int]) -> Iterator[dict[str, Value]]:
    """Equal gains of equal blocks are one row."""
    alike: dict[tuple[str, tuple[str, ...], int], list[str]] = {}
    for gain, mine in readers.items():
        last = tuple(".".join(one.weight.split(".")[-2:]) for one in mine)
        starred = ".".join("*" if piece.isdigit() else piece for piece in gain.split("."))
        alike.setdefault((starred, last, counts[gain]), []).append(gain)
    for (_, last, count), gains in alike.items():
        yield {"gain": starred_name(gains), "gains": len(gains), "maps": count, "read by": ", ".join(last)}


section = Section("Scale vectors", 34, examine, measures=True)
