"""`bake`: fold the multiplier of a tied readout into the norm before it, so that no hook is needed.

A plan multiplies the input of a tied readout by a number m. The readout reads what a norm made, `γ·n + β`. So

    γ' = m·γ,    β' = m·β

without the multiplier is the same function, if nothing else reads that norm. A gain that its norm adds 1 to
becomes `m·(1 + γ) − 1`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map

from theodolite.anatomy.names import canonical_parameters, unwrap
from theodolite.anatomy.structure.norms import Readings, follows_normalisation, is_normalisation, read_by
from theodolite.anatomy.structure.uses import Use
from theodolite.core.errors import UseError
from theodolite.core.exclusive import exclusive
from theodolite.planning.plan import Plan
from theodolite.planning.readout_multiplier import attach_multipliers, attached, detach_multipliers, missing
from theodolite.surgery.edits import Edits
from theodolite.surgery.gains import GainFinder, SurgeryError
from theodolite.surgery.proof import Edited, Proof, operate


@exclusive()
def bake(model: nn.Module, inputs: Any = None, *, plan: Plan | None = None) -> tuple[nn.Module, Proof]:
    """Fold the multipliers that a plan put on tied readouts into the norms before them, in place: for export.

    The multiplier goes into the gain (and the shift) of the norm that only the readout reads. The network
    computes the same without a hook, so any program that builds the plain architecture and loads the weights
    computes the same too. If there is no such norm the network is left as it was, and the error says why.

    Bake after training, or bake a copy. To train on afterwards would be to train with another
    parametrization, for which the plan's learning rate of that gain is wrong: do not go on with the
    optimizer. Sharded networks are refused: gather the weights into a whole network, and bake that.

    Args:
        model: with multipliers on it, as of `plan.build`, `plan.optimizer` or `plan.attach`; it may be
            wrapped in DDP or `torch.compile`.
        inputs: what it is called with, for the proof; by default what the plan was made with.
        plan: the plan it was trained under. A network with other multipliers is then refused, and one without
            multipliers is left as it is if the plan has none either.

    Returns:
        The model, and a Proof: by how much outputs and gradients differ.

    >>> import torch, theodolite as th
    >>> from functools import partial
    >>> tokens = torch.zeros(1, 8, dtype=torch.long)
    >>> tied = partial(th.models.GPT, tied=True)
    >>> plan = th.plan(tied, tokens, base=th.Size(32, 1), size=th.Size(64, 1), lr=2**-8)
    >>> model, proof = bake(plan.build(seed=0), plan=plan)
    >>> print(proof)
    bake: norm.weight takes up the multiplier 0.5 of readout
    outputs differ by 0.0e+00, gradients by 0.0e+00 (at most 1e-03), float32, on int64 (1, 8)

    Raises:
        SurgeryError: if there is no multiplier, or no norm that only the readout reads; it says why.
    """
    inner = unwrap(model)
    there = attached(inner)
    if inputs is None:
        inputs = None if plan is None else plan.inputs
        if inputs is None:
            raise UseError("inputs are missing: call bake(model, inputs). A plan from a file has none")
    device = next(inner.parameters()).device
    inputs = tree_map(lambda one: one.to(device) if isinstance(one, Tensor) else one, inputs)
    if plan is not None and there and there != plan.multipliers:
        raise SurgeryError(
            f"the network has the multipliers {there}, and the plan {dict(plan.multipliers)}: bake by the "
            "plan that it was trained under"
        )
    if not there and (plan is None or plan.multipliers):
        raise SurgeryError(_nothing(inner))

    # No parameter is new, so that a DDP wrapper need not know.
    return model, operate(inner, inputs, "bake", partial(_bake, multipliers=there))


def _nothing(model: nn.Module) -> str:
    """Why there is nothing to bake, and what to do about it."""
    kind = type(model).__name__
    if absent := missing(model):
        (name, factor), *_ = absent.items()
        return (
            f"there is no multiplier on this {kind}, but its config says that it was trained with "
            f"{factor:.4g} on the input of {name}: call plan.attach(model) first"
        )
    return (
        f"nothing to bake: there is no multiplier on this {kind}. It was baked already, or has nothing tied; "
        "if its weights come from a checkpoint, call plan.attach(model) first"
    )


def _bake(network: nn.Module, inputs: Any, edits: Edits, multipliers: Mapping[str, float]) -> Edited:
    """Fold each multiplier into the norm before its readout; raises where that would not be exact."""
    if not multipliers:
        return Edited((), {}, said="the plan has no multipliers, nothing was changed")
    finder = GainFinder(network, inputs)
    heads: dict[int, tuple[str, float]] = {}
    """By operation that reads out: the module and its multiplier."""
    for use in finder.flow.uses.all:
        module = use.alias.rpartition(".")[0]
        if use.kind == "weight" and module in multipliers:
            heads[use.node] = module, multipliers[module]
    if absent := set(multipliers) - {module for module, _ in heads.values()}:
        raise SurgeryError(f"{min(absent)}, which has a multiplier, is no readout on these inputs")
    gains = {
        name: read_by(finder.flow, uses, returned=True, tied=True)
        for name, uses in finder.uses.items()
        if uses[0].kind == "gain" and follows_normalisation(finder.flow, uses[0])
    }
    tensors = dict(canonical_parameters(network))
    said: dict[str, str] = {}
    scaled: dict[str, float] = {}
    for node, (module, factor) in heads.items():
        gain = _gain_before(finder, node, gains)
        why = _why_no_gain(finder, node) if gain is None else _obstacle(finder, gain, gains[gain], heads)
        if gain is None or why:
            culprit = "" if gain is None else f"{gain}, the gain of the norm before it: "
            raise SurgeryError(
                f"the multiplier {factor:.4g} of {module} cannot be folded into a norm. {culprit}{why}. The "
                "network is as it was: keep its multiplier, by plan.attach(model) wherever it is loaded"
            )
        said[gain] = f"{gain} takes up the multiplier {factor:.4g} of {module}"
        offsets = {gain: finder.uses[gain][0].offset, **dict.fromkeys(gains[gain].shifts, 0.0)}
        for name in offsets.keys() - scaled.keys():  # several readouts may read one norm
            tensor, offset = tensors[name], offsets[name]
            edits.write(tensor, factor * (tensor.detach().double() + offset) - offset)
            scaled[name] = factor
    detach_multipliers(network)
    edits.undos.append(lambda: attach_multipliers(network, multipliers))
    return Edited(tuple(said), {}, scaled=scaled, said=", ".join(said.values()))


def _gain_before(finder: GainFinder, node: int, gains: Mapping[str, Readings]) -> str | None:
    """The last gain of a norm before an operation, with no weight between."""
    flow = finder.flow

    def reaches(use: Use) -> bool:
        made = flow.graph.nodes[use.node].outputs[0]
        return any(
            made == value or (flow.between(made, value) and not flow.weights_between(made, value))
            for value in flow.signals(flow.graph.nodes[node])
        )

    uses = [use for name in gains for use in finder.uses[name] if reaches(use)]
    return max(uses, key=lambda use: use.node).name if uses else None


def _obstacle(
    finder: GainFinder, name: str, readings: Readings, heads: Mapping[int, tuple[str, float]]
) -> str:
    """Why a gain cannot take up the multiplier of the readouts that read it; empty if it can."""
    if why := finder.strange(name) or readings.obstacle:
        return why
    others = [read.weights[0] for read in readings.reads if read.node not in heads]
    if others:
        return f"{others[0]} reads it too, and is not multiplied"
    if len({heads[read.node][1] for read in readings.reads}) > 1:
        return "readouts with different multipliers read it"
    if any(channel < 0 for read in readings.reads for channel in read.channels):
        return "the readout reads something beside it"
    own = {use.node for use in finder.uses[name]}
    for shift in readings.shifts:
        if shift not in finder.tensors:
            return f"{shift} is added to it"
        if len(finder.owners[id(finder.tensors[shift])]) > 1:
            return f"its shift {shift} is shared"
        uses = finder.uses[shift]
        if len(uses) > 1 and not all(use.node in own for use in uses):
            return f"its shift {shift} is added to something else too"
    return ""


def _why_no_gain(finder: GainFinder, node: int) -> str:
    """What a readout reads instead of a norm with a gain."""
    flow = finder.flow
    maker = flow.maker(flow.back(flow.signals(flow.graph.nodes[node])[0]))
    if maker is not None and is_normalisation(flow, maker):
        return "The norm before it has no gain: build it with one"
    return "There is no norm with a gain before it"
