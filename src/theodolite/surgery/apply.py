"""One surgery from beginning to end: looked at, edited, looked at again; undone if the function changed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from theodolite.anatomy.names import canonical_parameters, unwrap
from theodolite.core.building import in_one_line, untouched_randomness
from theodolite.core.calling import call
from theodolite.surgery.editing import Edits
from theodolite.surgery.folded import Folded
from theodolite.surgery.places import SurgeryError
from theodolite.surgery.proof import TOLERANCE, Evidence, Proof, apart, farthest, gathered, resting, said
from theodolite.surgery.randomness import isolated, noise


@dataclass(frozen=True)
class Done:
    """What an edit did."""

    moved: tuple[str, ...]
    """Names of gains, or of blocks."""
    left: Mapping[str, str]
    maps: Sequence[Folded] = field(default_factory=tuple)
    """From what was there before to what the network computes with now, for all that is not the same."""
    scaled: Mapping[str, float] = field(default_factory=dict)
    """By tensor whose effect was multiplied by a number: the number."""
    called: Callable[[str], str] = str
    """From what a tensor was called before to its name now."""
    said: str = ""
    """In one sentence; nothing for what is said of gains."""
    new: nn.Module | None = None
    """A block that was not there before: during the proof its random numbers are its own."""
    examine: Callable[[Evidence], None] = lambda after: None
    """Raises if what the edited network shows is not as it should be."""


def conduct(
    model: nn.Module,
    inputs: Any,
    operation: str,
    act: Callable[[nn.Module, Edits], Done],
    follow: Callable[[Done], None] | None = None,
) -> Proof:
    """Edit the network in place and prove it; what fails on the way leaves the network as it was.

    `follow` is for what goes with the network, when all is well with that.

    Raises:
        SurgeryError: if outputs or gradients differ by more than rounding.
    """
    inner = unwrap(model)
    refuse_shards(model)
    before = gathered(inner, inputs)
    if before is not None and any(not bool(one.isfinite().any()) for one in before.outputs):
        raise SurgeryError(
            "the network's outputs on these inputs are not finite, so nothing can be proved: give other "
            "inputs, or weights that were not ruined"
        )
    edits = Edits()
    try:
        done = act(inner, edits)
        after = None if before is None else _after(inner, inputs, operation, done.new)
        outputs = gradients = None
        dtype = torch.float64
        if before is not None and after is not None:
            names = {name: done.called(name) for name in before.gradients}
            expected: dict[str, Tensor] = dict(after.effective)
            expected.update(
                {old: after.effective[new] for old, new in names.items() if new in after.effective}
            )
            for name, factor in done.scaled.items():
                if name in after.effective:
                    expected[name] = after.effective[name] * factor
            for each in done.maps:
                expected.update(each.pull(after.effective))
            dtype = before.dtype
            outputs = apart(before.outputs, after.outputs)
            gradients = farthest(before.gradients, expected, dtype)
            held = {name for name, _ in canonical_parameters(inner)}
            if any(
                names[name] in held and name not in expected and bool(one.any())
                for name, one in before.gradients.items()
            ):
                gradients = math.inf  # a tensor that is there still has no part in the outputs any more
        proof = Proof(
            operation,
            outputs,
            gradients,
            str(dtype).removeprefix("torch."),
            said(inputs),
            TOLERANCE[dtype],
            done.moved,
            done.left,
            done.said,
        )
        if not proof.holds:
            edits.undo()
            raise SurgeryError(
                _noise(inner, inputs, proof.tolerance, operation)
                or f"{operation} would change the network: outputs by {outputs:.1e} and gradients by "
                f"{gradients:.1e} of themselves, which is more than {proof.tolerance:.0e}, rounding in "
                f"{proof.dtype}. It was undone."
                + ("" if done.said else " Leave out what it does not suit: gains=[patterns]")
            )
        if after is not None:
            done.examine(after)
        if follow is not None:
            follow(done)
    except BaseException:
        edits.undo()
        raise
    return proof


def _after(model: nn.Module, inputs: Any, operation: str, new: nn.Module | None) -> Evidence | None:
    try:
        with nullcontext() if new is None else isolated(new, model):
            with torch.no_grad(), resting(model), untouched_randomness(0):
                call(model, inputs)  # as it is: evidence is gathered in wider numbers
            return gathered(model, inputs)
    except SurgeryError:
        raise
    except Exception as error:
        raise SurgeryError(
            f"{operation} would leave a network that cannot be called: {in_one_line(error)}. It was undone"
        ) from error


def _noise(model: nn.Module, inputs: Any, least: float, operation: str) -> str:
    """Why a proof cannot be made of a network that draws random numbers; nothing if it draws none."""

    def passes(others: bool) -> tuple[Tensor, ...]:
        found = gathered(model, inputs, others=others)
        return () if found is None else found.outputs

    reason = noise(passes, apart, least, "with the edit")
    return f"{operation} cannot be proved: {reason}. It was undone" if reason else ""


def refuse_shards(model: nn.Module) -> None:
    """Raise if parameters are cut into shards, or known to a wrapper that would not hear of new ones."""
    if isinstance(model, DistributedDataParallel):
        raise SurgeryError(
            "the network is wrapped in DistributedDataParallel, which knows only the parameters it was "
            "given: operate on the network first, then wrap it"
        )
    for name, tensor in canonical_parameters(model):
        if hasattr(tensor, "device_mesh"):
            raise SurgeryError(f"{name} is sharded: operate on the network before fully_shard, or on a copy")


def reasons(left: Mapping[str, str]) -> str:
    """Why nothing could be done, in a few lines."""
    if not left:
        return "it has no norms with gains"
    lines = [f"{name}: {reason}" for name, reason in list(left.items())[:4]]
    more = [f"and {len(left) - 4} more"] if len(left) > 4 else []
    return "\n".join([f"none of its {len(left)} gains could be moved", *lines, *more])
