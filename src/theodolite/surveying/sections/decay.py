"""Which gains may decay and which should not, and what the usual decay rules do with them."""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import nn

from theodolite.anatomy.names import canonical_modules
from theodolite.anatomy.part import Anatomy, Fold, Part, fold
from theodolite.optimizers.decay_policies import decays, gain_kind
from theodolite.present.text import counted
from theodolite.surveying.context import SurveyContext
from theodolite.surveying.finding import Check, Finding, Value, all_of
from theodolite.surveying.section import Section

BY_ROLE = Check(
    "TH501",
    "Weight decay of gains",
    "A gain γ that only linear maps read (Input-Norm) is part of the next matrix, W·diag(γ). Under gradient "
    "noise and without decay, γ drifts upwards and amplifies its own steps, so the scale-vector paper says "
    "that it should decay like W. A gain that reaches the stream, a softmax or another nonlinearity "
    "(Output-Norm) sets the size of a signal, which decay shrinks. So “decay everything” is wrong for the "
    "second kind. “No decay on vectors” also excludes the first kind, which may decay. Names do not tell the "
    "two apart. Whether it pays is open: in 1000 steps of a small GPT there was no difference at the best "
    "decay, and a strong decay did harm.",
)
CENTRED = Check(
    "TH502",
    "Zero-centred gains",
    "Weight decay pulls a parameter to zero. A zero-centred gain multiplies by 1 + γ, so decay pulls this "
    "factor to one. For an Input-Norm that still bounds its drift. For an Output-Norm it undoes what was "
    "learned, but silences nothing. The same weight decay acts differently than in a network with plain "
    "gains.",
)
SPARED_NAMES = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
"""The names that the Trainer of transformers excludes from decay, in lower case."""

PHRASES = {
    "Input-Norm gain": ("belongs to an Input-Norm", "belong to Input-Norms"),
    "Output-Norm gain": ("belongs to an Output-Norm", "belong to Output-Norms"),
    "scale": ("is an elementwise scale", "are elementwise scales"),
    "scale vector": ("is a scale vector inside a weight", "are scale vectors inside weights"),
    "direction": ("is the direction of a scale vector", "are directions of scale vectors"),
}
"""By kind of gain: of one, and of several."""


def examine(context: SurveyContext) -> Iterator[Finding]:
    """TH501, and TH502 where it applies."""
    yield by_role(context.anatomy, context.build_hollow(context.size))
    if any(part.offset for part in _gains(context.anatomy)):
        yield zero_centred(context.anatomy)


def by_role(anatomy: Anatomy, model: nn.Module) -> Finding:
    """TH501: which gains may decay, and which do under the usual rules."""
    gains = _gains(anatomy)
    if not gains:
        return BY_ROLE.finding("ok", "The network has no gains, so none can decay wrongly.")
    layer_norms = [name for name, module in canonical_modules(model) if isinstance(module, nn.LayerNorm)]
    usual = {  # the gains that decay under each rule
        "everything": gains,
        "not vectors": [part for part in gains if len(part.shape) > 1],
        "not norms, by name": [part for part in gains if not _spared_by_name(part.name, layer_norms)],
    }
    may = sum(map(decays, gains))
    wrong = {rule: sum(not decays(part) for part in decayed) for rule, decayed in usual.items()}
    spared = {rule: may - sum(map(decays, decayed)) for rule, decayed in usual.items()}
    common = any(counts[rule] for counts in (wrong, spared) for rule in ("not vectors", "not norms, by name"))
    return BY_ROLE.finding(
        "note" if common else "ok",
        f"{_counts(gains)} {_errors(wrong, spared)}",
        remedy=_remedy(gains) if common else "",
        numbers={f"wrong by “{rule}”": count for rule, count in wrong.items()}
        | {f"excluded by “{rule}”": count for rule, count in spared.items()},
        rows=[
            {**_row(one), **{f"decays: {rule}": _word(one.part in usual[rule]) for rule in usual}}
            for one in fold(gains)
        ],
    )


def zero_centred(anatomy: Anatomy) -> Finding:
    """TH502: gains that decay pulls to one."""
    gains = [part for part in _gains(anatomy) if part.offset]
    inputs, outputs = (fold(part for part in gains if decays(part) is could) for could in (True, False))
    remedy = []
    if inputs:
        remedy.append(
            f"Decay on {_listed(inputs)} keeps them near one, which bounds their drift: keep it, but do not "
            "expect the smaller gains that decay gives elsewhere."
        )
    if outputs:
        remedy.append(f"Exclude {_listed(outputs)}: decay undoes what they learn.")
    return CENTRED.finding(
        "note",
        f"{counted(len(gains), 'gain')} {'is' if len(gains) == 1 else 'are'} zero-centred, (1 + γ)·x: decay "
        "pulls 1 + γ to one, not to zero.",
        remedy=" ".join(remedy),
        rows=[_row(one) for one in fold(gains)],
    )


def _gains(anatomy: Anatomy) -> list[Part]:
    return [part for part in anatomy.values() if part.role == "gain"]


def _spared_by_name(name: str, layer_norms: list[str]) -> bool:
    """Does the Trainer of transformers exclude it, by its name or as a parameter of a LayerNorm?"""
    return bool(SPARED_NAMES.search(name.lower())) or name.rpartition(".")[0] in layer_norms


def _counts(gains: list[Part]) -> str:
    kinds: dict[str, int] = {}
    for label, (of_one, of_several) in PHRASES.items():
        for could in (True, False):
            count = sum(gain_kind(part) == label and decays(part) is could for part in gains)
            if count:
                phrase = of_one if count == 1 else of_several
                kinds[f"{phrase} and {'may' if could else 'should not'} decay"] = count
    if len(kinds) == 1:
        return f"{all_of(len(gains), 'gain')} {next(iter(kinds))}."
    return f"Of {len(gains)} gains, {'; '.join(f'{count} {kind}' for kind, count in kinds.items())}."


def _errors(wrong: dict[str, int], spared: dict[str, int]) -> str:
    """What the usual rules do; the rule by names only if it differs from that by dimensions."""
    rules = {"everything decays": "everything", "vectors do not decay": "not vectors"}
    if any(counts["not norms, by name"] != counts["not vectors"] for counts in (wrong, spared)):
        rules["norms are excluded by name"] = "not norms, by name"
    text = "; ".join(
        f"if {condition}, {_error(wrong[rule], spared[rule])}" for condition, rule in rules.items()
    )
    return f"{text[0].upper()}{text[1:]}."


def _error(wrong: int, spared: int) -> str:
    said = [f"{wrong} {'decays' if wrong == 1 else 'decay'} that should not"] if wrong else []
    said += [f"{spared} that may decay {'does' if spared == 1 else 'do'} not"] if spared else []
    return " and ".join(said) or "all is right"


def _remedy(gains: list[Part]) -> str:
    decaying, spared = (fold(part for part in gains if decays(part) is could) for could in (True, False))
    said, decay = [], "that" if spared else "the weight decay"
    if spared:
        said.append(f"Give no weight decay to {_listed(spared)}: th.probes.decay fixes an optimizer.")
    if decaying:
        said.append(
            f"{_listed(decaying)} may have {decay} of the matrices: th.plan does this, and so does "
            "apply(inputs=True) of th.probes.decay. This follows the scale-vector paper; a small GPT showed "
            "no benefit. Gain and matrix then shrink together, so tune the decay again."
        )
    return " ".join(said)


def _row(one: Fold) -> dict[str, Value]:
    return {
        "gain": one.pattern,
        "blocks": one.blocks,
        "role": gain_kind(one.part),
        "entries": one.part.numel,
        "may decay": _word(decays(one.part)),
    }


def _word(yes: bool) -> str:
    return "yes" if yes else "no"


def _listed(folds: list[Fold]) -> str:
    return ", ".join(one.pattern for one in folds)


section = Section("Weight decay", 32, examine)
