"""Which gains could decay and which should not, and what the usual rules make of them."""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import nn

from theodolite.anatomy.names import canonical_modules
from theodolite.anatomy.part import Anatomy, Fold, Part, fold
from theodolite.optimizers.decay_policies import decays, gain_kind
from theodolite.surveying.finding import Evidence, Finding, Value
from theodolite.surveying.section import Section
from theodolite.surveying.site import Site
from theodolite.surveying.wording import all_of, counted

WHY_ROLES = (
    "A gain γ that only linear maps read (Input-Norm) is part of the next matrix, W·diag(γ): under gradient "
    "noise, without decay, γ drifts upwards and amplifies its own steps, so by the scale-vector paper it "
    "should decay like W. A gain that reaches the stream, a softmax or another nonlinearity (Output-Norm) "
    "sets the size of a signal: decay shrinks what the network says. So “decay everything” is wrong for the "
    "second kind. “No decay on vectors” spares the first, which could decay; names do not tell the two "
    "apart. Whether it pays is open: in 1000 steps of a small GPT no difference was seen at the best decay, "
    "and a strong one did harm."
)
WHY_CENTRED = (
    "Weight decay pulls a parameter to zero. A zero-centred gain multiplies by 1 + γ, so decay pulls what it "
    "multiplies by to one. For an Input-Norm that is a bound on its drift all the same. For an Output-Norm "
    "it takes back what was learned, though it silences nothing. The same number of decay does "
    "another thing than in a network with plain gains."
)
SPARED_NAMES = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
"""The names that the Trainer of transformers spares from decay, in lower case."""

PHRASES = {
    "Input-Norm gain": ("belongs to an Input-Norm", "belong to Input-Norms"),
    "Output-Norm gain": ("belongs to an Output-Norm", "belong to Output-Norms"),
    "scale": ("is an elementwise scale", "are elementwise scales"),
    "scale vector": ("is a scale vector inside a weight", "are scale vectors inside weights"),
    "direction": ("is the direction of a scale vector", "are directions of scale vectors"),
}
"""What a gain can be: of one, and of several."""


def examine(site: Site) -> Iterator[Finding]:
    """TH501, and TH502 where it applies."""
    yield by_role(site.anatomy, site.build_hollow(site.size))
    if any(part.offset for part in _gains(site.anatomy)):
        yield zero_centred(site.anatomy)


def by_role(anatomy: Anatomy, model: nn.Module) -> Finding:
    """TH501: which gains could decay, and which would under the usual rules."""
    title = "Weight decay of gains"
    gains = _gains(anatomy)
    if not gains:
        sentence = "The network has no gains, so none can decay wrongly."
        return Finding("TH501", "ok", title, sentence, why=WHY_ROLES)
    layer_norms = [name for name, module in canonical_modules(model) if isinstance(module, nn.LayerNorm)]
    usual = {
        "everything": {part.name: True for part in gains},
        "not vectors": {part.name: len(part.shape) > 1 for part in gains},
        "not norms, by name": {part.name: not _spared_by_name(part.name, layer_norms) for part in gains},
    }
    wrong, spared = (
        {
            rule: sum(decayed[part.name] is not could and decays(part) is could for part in gains)
            for rule, decayed in usual.items()
        }
        for could in (False, True)
    )
    common = any(counts[rule] for counts in (wrong, spared) for rule in ("not vectors", "not norms, by name"))
    return Finding(
        "TH501",
        "note" if common else "ok",
        title,
        f"{_counts(gains)} {_errors(wrong, spared)}",
        why=WHY_ROLES,
        remedy=_remedy(gains) if common else "",
        evidence=Evidence(
            numbers={f"wrong by “{rule}”": count for rule, count in wrong.items()}
            | {f"spared by “{rule}”": count for rule, count in spared.items()},
            rows=tuple(
                {**_row(one), **{f"decays: {rule}": _word(usual[rule][one.part.name]) for rule in usual}}
                for one in fold(gains)
            ),
        ),
    )


def zero_centred(anatomy: Anatomy) -> Finding:
    """TH502: gains that decay pulls to one."""
    gains = [part for part in _gains(anatomy) if part.offset]
    outputs = [part for part in gains if not decays(part)]
    inputs = [part for part in gains if decays(part)]
    are = "is" if len(gains) == 1 else "are"
    sentence = (
        f"{counted(len(gains), 'gain')} {are} zero-centred, (1 + γ)·x: decay pulls 1 + γ to one, not to zero."
    )
    remedy = []
    if inputs:
        remedy.append(
            f"Decay on {_listed(fold(inputs))} holds them near one, which is what they need it for: keep it, "
            "and do not expect the smaller gains that decay gives elsewhere."
        )
    if outputs:
        remedy.append(f"Spare {_listed(fold(outputs))}: decay takes back what they learn.")
    return Finding(
        "TH502",
        "note",
        "Zero-centred gains",
        sentence,
        why=WHY_CENTRED,
        remedy=" ".join(remedy),
        evidence=Evidence(rows=tuple(_row(one) for one in fold(gains))),
    )


def _gains(anatomy: Anatomy) -> list[Part]:
    return [part for part in anatomy.values() if part.role == "gain"]


def _spared_by_name(name: str, layer_norms: list[str]) -> bool:
    """Does the Trainer of transformers spare it: by its name, or as a parameter of a LayerNorm?"""
    return bool(SPARED_NAMES.search(name.lower())) or name.rpartition(".")[0] in layer_norms


def _counts(gains: list[Part]) -> str:
    kinds: dict[str, int] = {}
    for label, (of_one, of_several) in PHRASES.items():
        for should in (True, False):
            count = sum(gain_kind(part) == label and decays(part) is should for part in gains)
            if count:
                phrase = of_one if count == 1 else of_several
                kinds[f"{phrase} and {'could' if should else 'should not'} decay"] = count
    if len(kinds) == 1:
        return f"{all_of(len(gains), 'gain')} {next(iter(kinds))}."
    return f"Of {len(gains)} gains, {'; '.join(f'{count} {kind}' for kind, count in kinds.items())}."


def _errors(wrong: dict[str, int], spared: dict[str, int]) -> str:
    """What the usual rules make of it; the rule by names only where it differs from that by dimensions."""
    rules = {"everything decays": "everything", "vectors are spared": "not vectors"}
    if any(counts["not norms, by name"] != counts["not vectors"] for counts in (wrong, spared)):
        rules["norms are spared by name"] = "not norms, by name"
    said = [f"if {condition}, {_error(wrong[rule], spared[rule])}" for condition, rule in rules.items()]
    text = "; ".join(said)
    return f"{text[0].upper()}{text[1:]}."


def _error(wrong: int, spared: int) -> str:
    said = [f"{wrong} {'decays' if wrong == 1 else 'decay'} that should not"] if wrong else []
    said += [f"{spared} that could decay {'does' if spared == 1 else 'do'} not"] if spared else []
    return " and ".join(said) or "all is right"


def _remedy(gains: list[Part]) -> str:
    decaying, spared = [p for p in gains if decays(p)], [p for p in gains if not decays(p)]
    said, decay = [], "that" if spared else "the weight decay"
    if spared:
        said.append(f"Give no weight decay to {_listed(fold(spared))}: th.probes.decay mends an optimizer.")
    if decaying:
        said.append(
            f"{_listed(fold(decaying))} could have {decay} of the matrices: th.plan does so, and "
            "apply(inputs=True) of th.probes.decay. So says the scale-vector paper; on a small GPT no "
            "benefit could be seen. Gain and matrix then shrink together, so tune the decay again."
        )
    return " ".join(said)


def _row(one: Fold) -> dict[str, Value]:
    part = one.part
    return {
        "gain": one.pattern,
        "blocks": one.blocks,
        "role": gain_kind(part),
        "entries": part.numel,
        "could decay": _word(decays(part)),
    }


def _word(yes: bool) -> str:
    return "yes" if yes else "no"


def _listed(folds: list[Fold]) -> str:
    return ", ".join(one.pattern for one in folds)


section = Section("Weight decay", 32, examine)
