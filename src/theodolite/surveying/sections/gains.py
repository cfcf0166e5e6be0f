"""Which scale vectors linear maps share, and how the vectors and the columns they multiply are balanced."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from theodolite.anatomy.names import starred_name
from theodolite.core.errors import UseError
from theodolite.probes.gains.scale_vectors import ScaledMap, ScaleVector, find_maps, find_vectors
from theodolite.surgery.editing import scaled_weights
from theodolite.surgery.folded import prefix_of
from theodolite.surgery.places import find_places
from theodolite.surveying.finding import Evidence, Finding, Value
from theodolite.surveying.section import Section
from theodolite.surveying.site import Site
from theodolite.surveying.wording import counted, listed, plain

WHY_SHARED = (
    "A gain that only linear maps read adds nothing to what they can compute: it preconditions them. It "
    "multiplies the gradient of column j by γ_j² and adds a step along the column itself. Maps that share a "
    "gain share one preconditioner, though their gradients differ. Surgery gives each its own, at no change "
    "of the function and no cost once it is folded back."
)
WHY_BALANCE = (
    "A gradient step moves column j of the effective matrix W·diag(γ) by γ_j²I + w_j w_jᵀ times its "
    "gradient: γ_j² across the column and γ_j² + ‖w_j‖² along it. Where ‖w_j‖² is far larger, columns change "
    "their length much faster than their direction; where it is far smaller, the gain hardly learns, and is "
    "no more than a factor on the learning rate. Gradient flow keeps γ_j² − ‖w_j‖² as it was at the start."
)
LOPSIDED = 1000.0
"""By which factor ‖w_j‖² and γ_j² may differ. Usual initialisations give 1 to 100."""
MOST_PARAMETERS = 250_000_000
"""A gigabyte in float32: columns of larger networks are not looked at."""


def examine(site: Site) -> Iterator[Finding]:
    """TH511, and TH512 where there are vectors to look at."""
    model = site.build_traceable(site.size)
    try:
        maps = find_maps(model, site.inputs)
    except UseError:
        sentence = (
            _left(site, model, ()) or "No gain of a norm is read by linear maps alone, so none is shared."
        )
        yield Finding("TH511", "ok", "Shared gains", sentence, why=WHY_SHARED)
        return
    own = {name for name, (_, vectors) in scaled_weights(model).items() if vectors.inputs}
    yield shared([one for one in maps if one.weight not in own], len(own), _left(site, model, maps))
    if sum(tensor.numel() for tensor in model.parameters()) <= MOST_PARAMETERS:
        model = site.build()
        vectors = [one for one in find_vectors(model, find_maps(model, site.inputs)) if not one.obstacle]
        if vectors:
            yield balance(vectors)


def shared(maps: Sequence[ScaledMap], num_own: int = 0, left: str = "") -> Finding:
    """TH511: gains that several linear maps read; `num_own` others have vectors of their own.

    `left` is a sentence on those that cannot be moved.
    """
    readers: dict[str, list[ScaledMap]] = {}
    for one in maps:
        readers.setdefault(one.place.gain, []).append(one)
    counts = {gain: _number(mine) for gain, mine in readers.items()}
    several = [gain for gain, count in counts.items() if count > 1]
    if not several:
        total = len(counts) + num_own
        sentence = f"{counted(total, 'linear map')} {_read(total)} a norm, and no two share a scale vector. "
        sentence = f"{sentence}{left}".rstrip()
        return Finding("TH511", "ok", "Shared gains", sentence, why=WHY_SHARED)
    total = sum(counts[gain] for gain in several)
    return Finding(
        "TH511",
        "note",
        "Gains that several linear maps share",
        f"{counted(len(several), 'gain')} {_are(len(several))} shared by {total} linear maps, each of which "
        f"could have its own. {left}".rstrip(),
        why=WHY_SHARED,
        remedy="th.surgery.scale_vectors(model, inputs) gives each map a vector of its own, on both of its "
        "sides; th.surgery.fold takes them back into the weights when training is over. Try whether it "
        "helps: the scale-vector paper says so; on a small GPT it was not beyond doubt.",
        evidence=Evidence(
            numbers={"gains": len(counts), "shared": len(several), "maps that share": total},
            rows=tuple(_shared_rows(readers, counts)),
        ),
    )


def balance(vectors: Sequence[ScaleVector]) -> Finding:
    """TH512: columns whose gain is tiny against them, or huge."""
    ratios = {one.name: _ratio(one) for one in vectors}
    known = {name: ratio for name, ratio in ratios.items() if ratio is not None}
    far = {name: ratio for name, ratio in known.items() if not 1 / LOPSIDED <= ratio <= LOPSIDED}
    title = "Balance of gains and columns"
    numbers: dict[str, Value] = {"vectors": len(vectors), "far from balance": len(far)}
    if known:
        numbers |= {"smallest ‖w‖²/γ²": min(known.values()), "largest ‖w‖²/γ²": max(known.values())}
    if not known:
        sentence = "The columns that gains multiply are all zero, or the gains are: nothing is balanced yet."
        return Finding("TH512", "ok", title, sentence, why=WHY_BALANCE, evidence=Evidence(numbers))
    ends = dict.fromkeys((plain(min(known.values())), plain(max(known.values()))))
    span = " to ".join(ends)
    if not far:
        sentence = f"‖w_j‖² is {span} times γ_j², in the median of each scale vector: both learn."
        return Finding("TH512", "ok", title, sentence, why=WHY_BALANCE, evidence=Evidence(numbers))
    large = [name for name, ratio in far.items() if ratio > 1]
    small = [name for name, ratio in far.items() if ratio <= 1]
    said = [
        f"‖w_j‖² is up to {plain(max(far.values()))} times γ_j² in {listed(large)}" if large else "",
        f"γ_j² is up to {plain(1 / min(far.values()))} times ‖w_j‖² in {listed(small)}" if small else "",
    ]
    return Finding(
        "TH512",
        "note",
        "Gains out of balance with their columns",
        f"{'; '.join(each for each in said if each)}.",
        why=WHY_BALANCE,
        remedy="Start the gain and the weights at comparable sizes: th.surgery.fold multiplies the gain into "
        "the weights and leaves it at one, which changes the ratio and not the function. th.probes."
        "preconditioning has the numbers of every column.",
        evidence=Evidence(
            numbers, rows=tuple({"scale vector": name, "‖w‖²/γ²": ratio} for name, ratio in far.items())
        ),
    )


def _left(site: Site, model: nn.Module, maps: Sequence[ScaledMap]) -> str:
    """A sentence on gains that linear maps alone read and that cannot be moved into them, with a reason."""
    found = {one.place.gain for one in maps}
    parts = tuple(prefix_of(name) for name in found)  # of gains that surgery has made of a magnitude
    gains = [part.name for part in site.anatomy.trained if part.norm == "input" and part.op == "norm"]
    missing = [name for name in gains if name not in found and not name.startswith(parts)]
    why = find_places(model, site.inputs).left if missing else {}
    names = [name for name in missing if name in why]
    if not names:
        return ""
    more = f"; and {len(names) - 1} more" if len(names) > 1 else ""
    first = f"{names[0]}, as {why[names[0]]}"
    return (
        f"{counted(len(names), 'gain')} that only linear maps read cannot be moved into them: {first}{more}."
    )


def _number(maps: Sequence[ScaledMap]) -> int:
    """How many linear maps: q, k and v of one fused tensor are three."""
    return sum(len(one.reader.shape.rows) for one in maps)


def _ratio(one: ScaleVector) -> float | None:
    """The median of ‖w_j‖²/γ_j²; None where all columns or all gains are zero, as before the first step."""
    there = (one.gain_squares > 0) & (one.weight_squares > 0)
    return float((one.weight_squares[there] / one.gain_squares[there]).median()) if there.any() else None


def _shared_rows(readers: dict[str, list[ScaledMap]], counts: dict[str, int]) -> Iterator[dict[str, Value]]:
    """Equal gains of equal blocks as one row."""
    alike: dict[tuple[str, tuple[str, ...], int], list[str]] = {}
    for gain, mine in readers.items():
        last = tuple(".".join(one.weight.split(".")[-2:]) for one in mine)
        starred = ".".join("*" if piece.isdigit() else piece for piece in gain.split("."))
        alike.setdefault((starred, last, counts[gain]), []).append(gain)
    for (_, last, count), gains in alike.items():
        yield {"gain": starred_name(gains), "gains": len(gains), "maps": count, "read by": ", ".join(last)}


def _read(count: int) -> str:
    return "reads" if count == 1 else "read"


def _are(count: int) -> str:
    return "is" if count == 1 else "are"


section = Section("Scale vectors", 34, examine, measures=True)
