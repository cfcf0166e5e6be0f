"""Where one more block would help: the gradient with respect to the output of blocks that do not exist yet.

A block `h + Zφ(h)` with Z = 0 changes nothing, and the gradient of the loss with respect to its Z is

    M = E[g φᵀ],   g = ∂ℓ/∂h

A small step along −M lowers the loss by ‖M‖² per unit of step. M is not known, only a mean M̄ over some
examples, and ‖M̄‖² contains the noise of M̄. So M̄ is judged by other, held-out examples: the mean of `⟨M̄, M_i⟩`
over them is an unbiased estimate of the slope along −M̄, and its spread gives the standard error.

The preconditioned direction is `M̄ (S + ρI)⁻¹`, `S = E[φφᵀ]`, judged in the same way.

References:
    A qualitative test-risk mechanism for scaling behavior in normalized residual networks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from theodolite.anatomy.names import canonical_parameters, unwrap
from theodolite.core import arguments
from theodolite.core.batches import Batch, Batches, device_of, on_device
from theodolite.core.building import evaluated, untouched_randomness
from theodolite.core.calling import Loss, call, logits, require_logits
from theodolite.core.errors import UseError
from theodolite.core.examples import batches_of, count_examples, each_batch, num_examples, take
from theodolite.core.exclusive import exclusive
from theodolite.core.finite import among, not_finite
from theodolite.core.higher_order import without_checkpoints
from theodolite.core.progress import Progress
from theodolite.present.text import counted
from theodolite.probes.eval_mode import at_rest
from theodolite.probes.signal.candidates import Candidate, Candidates
from theodolite.probes.signal.gradient_statistics import (
    FEWEST,
    alignment_bound,
    describe,
    mean_interval,
    misleads,
)
from theodolite.probes.signal.passes import Passes, Runner, Uneven, refuse_not_finite
from theodolite.probes.signal.result import PointSignal, Signal
from theodolite.probes.signal.sites import WIDEST, wide
from theodolite.surgery import InsertionPoint, InsertionPoints, find_points

DELTA = 0.05
"""How often a network without any signal may be said to have one: the level of Student's t."""
RIDGE = 1e-2
MOST_LISTS = 4
"""Of so many lists of blocks it is said why no block can be inserted."""
CORNERS = 0.01
"""The stream comes from a ReLU if at least this fraction is zero."""


@exclusive(keep_autocast=True)
def signal(
    model: nn.Module,
    loss: Loss,
    batches: Batches,
    held_out: Batches | None = None,
    *,
    points: InsertionPoints | Iterable[InsertionPoint | str | int] | None = None,
    fresh: nn.Module | None = None,
    ridge: float = RIDGE,
    delta: float = DELTA,
    matrices: bool = False,
    progress: Progress | None = None,
) -> Signal:
    """Measure what a block could do at every point of a network; the network is left unchanged.

    Every example is run once, with a closed candidate block at each point, and gets one backward pass.

    Args:
        model: any module with its residual blocks in an nn.ModuleList or nn.Sequential, on any device.
        loss: `loss(logits, targets) -> scalar`, of each example (an index of dimension 0) by itself.
        batches: pairs (inputs, targets) whose examples the directions are estimated on.
        held_out: pairs whose examples judge them; they must be other examples. None: the first half of the
            examples of `batches` estimates and the second half judges, in order, so that neighbours, which
            may be alike, stay together.
        points: which points; all by default. `find_points` finds them.
        fresh: a network built alike whose blocks the candidates are copies of; by default copies of their
            neighbours.
        ridge: ρ of the preconditioned direction, relative to the mean of S's diagonal.
        delta: the level of Student's t: how often a network without signal is said to have one, if the
            products `⟨M̄, M_i⟩` are not very skewed. If they are, or are fewer than 30, the point is `unsure`.
        matrices: keep the covariance matrices of more than 128 channels.
        progress: called with a title and the fraction done.

    >>> import torch, theodolite as th
    >>> model = th.models.GPT(64, 2, vocab=16, context=8)
    >>> tokens = torch.randint(16, (8, 9), generator=torch.Generator().manual_seed(0))
    >>> found = signal(model, th.workloads.next_token_loss, (tokens[:, :-1], tokens[:, 1:]))
    >>> [one.name for one in found.points], found.estimated_on, found.judged_on
    (['blocks.0', 'blocks.1', 'blocks.2'], 4, 4)

    Raises:
        UseError: if there are no residual blocks in a list, fewer than two held-out examples, a loss that is
            not finite, or a loss that is not defined for an example by itself.
    """
    require_logits(loss, "The signal of a block")
    arguments.positive("ridge", ridge)
    if not arguments.is_number(delta) or not 0 < delta < 1:
        raise UseError(f"delta is {delta!r}: give a number between 0 and 1, as 0.05")
    model = _bare(model)
    fresh = None if fresh is None else _bare(fresh)
    first = next(iter(each_batch(batches)))
    device = device_of(model)
    known = _points(model, first, device, points)
    tell = _batch_progress(progress, batches, held_out)
    with ExitStack() as stack:
        for network in (model,) if fresh is None else (model, fresh):
            stack.enter_context(at_rest(network))
            _freeze(network)
        candidates = Candidates(model, known.found, fresh)
        stack.enter_context(candidates.in_stream())
        stack.enter_context(without_checkpoints())
        runner = Runner(model, loss, candidates, device)
        differs = runner.trial(first)
        while True:
            try:
                passes = _run(Passes(runner), *_samples(batches, held_out), ridge, tell)
                break
            except Uneven:
                candidates.give_up_uneven()
    found = Signal(
        points=tuple(_point(one, passes, matrices) for one in candidates.each),
        loss=passes.total_loss / (passes.estimated_on + passes.judged_on),
        estimated_on=passes.estimated_on,
        judged_on=passes.judged_on,
        delta=delta,
        left=known.left,
        notes=(),
        doubt=_doubt(passes),
    )
    notes = [*([differs] if differs else []), *_notes(found, passes), *_remarks(candidates)]
    return replace(found, notes=tuple(notes))


def _batch_progress(
    progress: Progress | None, batches: Batches, held_out: Batches | None
) -> Callable[[], None]:
    """What is called after each batch; it reports the fraction done if the number of batches is known."""
    samples = [batches_of(one) for one in (batches, held_out) if one is not None]
    if progress is None or not all(isinstance(one, Sized) for one in samples):
        return lambda: None
    total, done = sum(map(len, samples)), itertools.count(1)
    return lambda: progress("signal", min(1.0, next(done) / total))


def _bare(model: nn.Module) -> nn.Module:
    """The unwrapped network; sharded ones are refused."""
    if not isinstance(model, nn.Module):
        raise UseError(f"model is a {type(model).__name__}, not a torch.nn.Module")
    for name, tensor in model.named_parameters():
        if type(tensor).__name__ in ("DTensor", "FlatParameter"):
            raise UseError(f"{name} is sharded ({type(tensor).__name__}): measure an unsharded copy")
    return unwrap(model)


def _points(
    model: nn.Module,
    batch: Batch,
    device: torch.device,
    points: InsertionPoints | Iterable[InsertionPoint | str | int] | None,
) -> InsertionPoints:
    """The points; found on two examples if they are not given."""
    if isinstance(points, InsertionPoints):
        known = points
    else:
        inputs = on_device(take(batch, slice(0, 2)), str(device))[0]
        known = find_points(model, inputs)
        if not known.found:
            _check_finite(model, inputs)
        if points is not None:
            known = InsertionPoints(tuple(known.at(one) for one in points), known.left)
    if not known.found:
        raise UseError(f"there is no point where a block could be inserted. {_reasons(known.left)}")
    return known


def _reasons(left: Mapping[str, str]) -> str:
    """Why there is no point, on a line for the first place of each list."""
    if not left:
        return "None was given"
    first: dict[str, str] = {}
    for name, reason in left.items():
        said = reason.removeprefix(f"{name}: ").rstrip(".")
        first.setdefault(name.rpartition(".")[0], f"{name}: {said}")
    lines, more = list(first.values())[:MOST_LISTS], len(first) - MOST_LISTS
    return ";\n".join([*lines, *([f"and {counted(more, 'more list')}"] if more > 0 else [])])


def _check_finite(model: nn.Module, inputs: Any) -> None:
    """Raise if no points were found because weights or logits are not finite."""
    weights = dict(canonical_parameters(model))
    if bad := not_finite(weights):
        raise UseError(
            f"weights are not finite, in {among(bad, len(weights))}: there is no signal to measure"
        )
    with torch.no_grad(), evaluated(model), untouched_randomness(0):
        found = logits(call(model, inputs))
    if not bool(found.isfinite().all()):
        raise UseError("the logits are not finite: there is no signal to measure. Look for an overflow")


def _freeze(model: nn.Module) -> None:
    """Replace parameters by tensors without a gradient; `at_rest` restores them."""
    for module in model.modules():
        for name, tensor in module._parameters.items():
            if tensor is not None:
                plain = tensor.detach().clone() if tensor.is_inference() else tensor.detach()
                module._parameters[name] = plain  # type: ignore[assignment]


def _samples(batches: Batches, held_out: Batches | None) -> tuple[Iterator[Batch], Iterator[Batch]]:
    """The batches that directions are estimated on, and those that judge them."""
    judges = batches_of(batches if held_out is None else held_out)
    if isinstance(judges, (list, tuple)):  # counting the examples of a loader takes a pass over it
        _refuse_few(count_examples(judges) // (2 if held_out is None else 1))
    if held_out is None:
        number = count_examples(batches)
        middle = (number + 1) // 2
        return _between(batches, 0, middle), _between(batches, middle, number)
    return each_batch(batches), each_batch(held_out)


def _between(batches: Batches, start: int, stop: int) -> Iterator[Batch]:
    """Consecutive examples, counted through all batches."""
    for batch in each_batch(batches):
        if stop <= 0:
            return
        number = num_examples(batch)
        if start < number:
            yield take(batch, slice(max(start, 0), min(stop, number)))
        start, stop = start - number, stop - number


def _refuse_few(examples: int) -> None:
    if examples < 2:
        raise UseError(
            f"the number of held-out examples is {examples}: at least 2 are needed for a standard error. "
            "Give more batches, or held_out"
        )


def _run(
    passes: Passes,
    batches: Iterable[Batch],
    held_out: Iterable[Batch],
    ridge: float,
    tell: Callable[[], None],
) -> Passes:
    for index, batch in enumerate(batches):
        passes.estimate(batch, index)
        tell()
    passes.settle(ridge)
    for index, batch in enumerate(held_out):
        passes.judge(batch, index)
        tell()
    _refuse_few(passes.judged_on)
    return passes


def _point(candidate: Candidate, passes: Passes, matrices: bool) -> PointSignal:
    directions, preconditioned_directions = passes.directions[candidate]
    products, alignments = (torch.cat(one[candidate]) for one in (passes.products, passes.alignments))
    refuse_not_finite(candidate.point.name, products, alignments, *directions.values())
    plain, preconditioned = products.sum(1).unbind(1)
    examples = passes.estimated_on + passes.judged_on
    covariance = describe(passes.gradients[candidate].covariance(examples), examples, keep=matrices)
    alignment, low, high = mean_interval(alignments)
    return PointSignal(
        point=candidate.point,
        norm=math.sqrt(sum(float(one.double().square().sum()) for one in directions.values())),
        gain=float(plain.mean()),
        error=_error(plain),
        shares=tuple(products[..., 0].mean(0).tolist()),
        preconditioned=float(preconditioned.mean()),
        preconditioned_error=_error(preconditioned),
        directions=_rounded(candidate, directions),
        preconditioned_directions=_rounded(candidate, preconditioned_directions),
        gradient=float(passes.means[candidate].norm()),
        alignment=alignment,
        alignment_interval=(low, high),
        alignment_bound=alignment_bound(
            passes.estimated_on,
            passes.judged_on,
            norm_mu=math.sqrt(max(alignment, 0.0)),
            lambda_max=covariance.largest,
            trace=covariance.trace,
        ),
        covariance=covariance,
        unsure=passes.one_class or misleads(plain),
    )


def _error(values: Tensor) -> float:
    return float(values.std()) / math.sqrt(len(values))


def _rounded(candidate: Candidate, directions: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """In the dtype of the tensors, at least float32; in the order of the point's output tensors."""
    dtype = wide(next(iter(candidate.block.parameters())).dtype)
    names = [tensor.name for tensor in candidate.point.outputs]
    return {name: directions[name].to(dtype) for name in names if name in directions}


def _notes(found: Signal, passes: Passes) -> Iterator[str]:
    """What to know about the samples."""
    if passes.shared:
        yield (
            f"{passes.shared} of the {found.judged_on} held-out examples have inputs that are also in the "
            "other sample: the gains are too high by what was learnt from them"
        )
    least = min(found.points, key=lambda one: one.significance)
    if least.significance < -found.threshold:
        yield (
            f"the gain at {least.name} is {-least.significance:.3g} standard errors below zero: do the two "
            "samples differ? Shuffle the examples, or give a held_out of the same kind"
        )
    if seeming := found.seeming:
        many = f"{len(seeming)} points, as at " if len(seeming) > 1 else ""
        yield (
            f"at {many}{seeming[0].name}, the gain seems to be above its noise (?), but {found.doubt}: use "
            "more examples"
        )


def _doubt(passes: Passes) -> str:
    """Why Student's t is not to be trusted, where it is not."""
    if passes.one_class:
        return "all held-out examples are of one class, and those of other classes are not known"
    if passes.judged_on < FEWEST:
        return f"{passes.judged_on} held-out examples are too few to know, {FEWEST} are needed"
    return "few held-out examples make up most of the spread (the products are skewed)"


def _remarks(candidates: Candidates) -> Iterator[str]:
    """Where the signal is not exact."""
    whole = {candidate.point.name: name for candidate in candidates.each for name in candidate.whole}
    if whole:
        yield (
            f"at {counted(len(whole), 'point')}, as at {next(iter(whole))}, {next(iter(whole.values()))} is "
            "not the weight of a linear map or norm that is called as a module: its gradient is autograd's, "
            "held-out examples were run one by one, and it is scaled as the others are on average, not "
            "preconditioned"
        )
    corners = [candidate for candidate in candidates.each if candidate.zeros > CORNERS]
    if corners:
        most = max(candidate.zeros for candidate in corners)
        yield (
            f"at {counted(len(corners), 'point')} the stream is exactly zero in up to {most:.0%} of its "
            "entries, as after a ReLU. There a step can only add, which the gradient does not show: steps "
            "change the loss by somewhat more or less than the gain, however small they are"
        )
    wide_maps = [one for candidate in candidates.each for one in candidate.sites if one.features > WIDEST]
    if wide_maps:
        yield (
            f"{counted(len(wide_maps), 'map')} with more than {WIDEST} features: preconditioned by the "
            "diagonal of S alone"
        )
