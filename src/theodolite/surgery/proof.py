"""Edit a network and prove that it computes the same: compare outputs and gradients before and after."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from theodolite.anatomy.names import canonical_parameters, unwrap
from theodolite.anatomy.recording.trace import tensors_in
from theodolite.core.building import evaluated, in_one_line, untouched_randomness
from theodolite.core.calling import call, with_tensors
from theodolite.core.higher_order import plain_operators
from theodolite.present.result import Block, Result
from theodolite.present.text import counted
from theodolite.surgery.edits import Edits, scaled_gains, scaled_weights
from theodolite.surgery.fold_map import FoldMap
from theodolite.surgery.gains import SurgeryError
from theodolite.surgery.randomness import change_randomness, isolated, kept_randomness

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.1}
"""The allowed relative difference, by the coarsest dtype that a network holds or computes in. About ten times
what rounding does to a network of a dozen blocks."""
HALVES = (torch.float16, torch.bfloat16)
"""A network in halves is called in float32, so that only the rounding of what it holds is seen."""


@dataclass(frozen=True)
class Proof(Result):
    """By how much an edit changed the outputs and gradients of a network."""

    kind: ClassVar[str] = "proof"
    loads: ClassVar[bool] = True

    operation: str
    outputs: float | None
    """Largest difference between the outputs before and after, relative to the largest output; None on the
    meta device, where nothing is computed."""
    gradients: float | None
    """The same for the gradient with respect to each tensor that was there before; the worst of all tensors.
    After the edit it follows from the gradients with respect to the products that the network computes with,
    by the chain rule."""
    dtype: str
    """The coarsest that the network holds or computes in."""
    inputs: str
    """What the network was called with."""
    rtol: float
    moved: tuple[str, ...]
    """The gains that are part of the weights now, or the new blocks."""
    left: Mapping[str, str] = field(default_factory=dict)
    """The gains that were not moved, and why."""
    said: str = ""
    """What was done, in one sentence; empty if it is about gains."""

    @property
    def holds(self) -> bool:
        """Are both differences within `rtol`? True where nothing could be computed."""
        if self.outputs is None or self.gradients is None:
            return True
        return self.outputs <= self.rtol and self.gradients <= self.rtol

    def blocks(self) -> Iterator[Block]:
        """What was done, the differences, and what was left."""
        said = self.said or f"{counted(len(self.moved), 'gain')} moved, {len(self.left)} left"
        compared = "not compared: on the meta device nothing is computed"
        if self.outputs is not None:
            compared = (
                f"outputs differ by {self.outputs:.1e}, gradients by {self.gradients:.1e} "
                f"(at most {self.rtol:.0e}), {self.dtype}, on {self.inputs}"
            )
        left = (f"  left {name}: {reason}" for name, reason in self.left.items())
        yield "\n".join([f"{self.operation}: {said}", compared, *left])


@dataclass(frozen=True)
class Response:
    """Outputs of a network, and gradients of a fixed random combination of them."""

    outputs: tuple[Tensor, ...]
    """Everything it returned that is a number."""
    dtype: torch.dtype
    """The coarsest that is held or was computed in."""
    gradients: Mapping[str, Tensor]
    """By canonical name of a parameter that is trained and used."""
    effective: Mapping[str, Tensor]
    """By the tensors that the network computes with: a weight with scale vectors in it is the product, under
    its plain name."""


@dataclass(frozen=True)
class Edited:
    """What an edit did."""

    moved: tuple[str, ...]
    """Names of gains, or of blocks."""
    left: Mapping[str, str]
    """Gains that were not moved, and why."""
    maps: Sequence[FoldMap] = ()
    """From the tensors before to those that the network computes with now, where they are not the same."""
    scaled: Mapping[str, float] = field(default_factory=dict)
    """By tensor whose effect was multiplied by a number: the number."""
    renamed: Callable[[str], str] = str
    """From a tensor's name before to its name now."""
    said: str = ""
    """In one sentence; empty if it is about gains."""
    new: nn.Module | None = None
    """A new block: during the proof it has its own random numbers."""
    examine: Callable[[Response], None] = lambda after: None
    """Raises if the edited network's response is not as it should be."""


def operate(
    model: nn.Module,
    inputs: Any,
    operation: str,
    edit: Callable[[nn.Module, Any, Edits], Edited],
    follow: Callable[[Edited], None] | None = None,
) -> Proof:
    """Edit the network in place and prove it; on failure the network is as it was.

    `edit` gets the network, the inputs and the record of its edits; `follow` updates what goes with the
    network, once the proof holds.

    Raises:
        SurgeryError: if outputs or gradients differ by more than rounding.
    """
    inner = unwrap(model)
    refuse_shards(model)
    before = respond(inner, inputs)
    if before is not None and any(not bool(one.isfinite().any()) for one in before.outputs):
        raise SurgeryError(
            "the network's outputs on these inputs are not finite, so nothing can be proved: give other "
            "inputs, or weights that were not ruined"
        )
    with Edits().undone_on_failure() as edits:
        done = edit(inner, inputs, edits)
        after = None if before is None else _respond_after(inner, inputs, operation, done.new)
        expected = {} if before is None or after is None else _expected(inner, before, after, done)
        proof = compare(operation, inputs, before, after, expected, done)
        if not proof.holds:
            edits.undo()
            raise SurgeryError(
                _explain_noise(inner, inputs, proof.rtol, operation)
                or f"{operation} would change the network: outputs by {proof.outputs:.1e} and gradients by "
                f"{proof.gradients:.1e} of themselves, which is more than {proof.rtol:.0e}, rounding in "
                f"{proof.dtype}. It was undone."
                + ("" if done.said else " Leave out what it does not suit: gains=[patterns]")
            )
        if after is not None:
            done.examine(after)
        if follow is not None:
            follow(done)
    return proof


def compare(
    operation: str,
    inputs: Any,
    before: Response | None,
    after: Response | None,
    expected: Mapping[str, Tensor],
    done: Edited,
) -> Proof:
    """The proof; `expected` holds the gradients that follow from the response after the edit."""
    outputs = gradients = None
    dtype = torch.float64
    if before is not None and after is not None:
        dtype = before.dtype
        outputs = output_difference(before.outputs, after.outputs)
        gradients = _gradient_difference(before.gradients, expected, dtype)
    leaves = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
    on = ", ".join(f"{_name(leaf.dtype)} {tuple(leaf.shape)}" for leaf in leaves)
    measured = (outputs, gradients, _name(dtype), on, TOLERANCE[dtype])
    return Proof(operation, *measured, done.moved, done.left, done.said)


def _expected(model: nn.Module, before: Response, after: Response, done: Edited) -> dict[str, Tensor]:
    """The gradients with respect to the tensors before, from the response after."""
    names = {name: done.renamed(name) for name in before.gradients}
    expected = dict(after.effective)
    expected.update({old: after.effective[new] for old, new in names.items() if new in after.effective})
    for name, factor in done.scaled.items():
        if name in after.effective:
            expected[name] = after.effective[name] * factor
    for each in done.maps:
        expected.update(each.pull(after.effective))
    held = {name for name, _ in canonical_parameters(model)}
    for name, one in before.gradients.items():
        if names[name] in held and name not in expected and bool(one.any()):
            expected[name] = torch.full_like(one, math.inf)  # it is there, but the outputs ignore it
    return expected


def _respond_after(model: nn.Module, inputs: Any, operation: str, new: nn.Module | None) -> Response | None:
    try:
        with nullcontext() if new is None else isolated(new, model):
            with torch.no_grad(), _in_eval_mode(model), untouched_randomness(0):
                call(model, inputs)  # as it is: the response is computed in wider numbers
            return respond(model, inputs)
    except SurgeryError:
        raise
    except Exception as error:
        raise SurgeryError(
            f"{operation} would leave a network that cannot be called: {in_one_line(error)}. It was undone"
        ) from error


def _explain_noise(model: nn.Module, inputs: Any, least: float, operation: str) -> str:
    """Why nothing can be proved of a network that draws random numbers; empty if it draws none."""

    def passes(others: bool) -> tuple[Tensor, ...]:
        found = respond(model, inputs, others=others)
        return () if found is None else found.outputs

    reason = noise(passes, least, "with the edit")
    return f"{operation} cannot be proved: {reason}. It was undone" if reason else ""


def noise(passes: Callable[[bool], Sequence[Tensor]], least: float, edit: str) -> str:
    """Why outputs of a network differ, if its randomness is the cause; otherwise empty.

    Args:
        passes: a forward pass through the network as it is, on the same random numbers or on others.
        least: what counts as a difference.
        edit: what was done to the network, as in "with one block more".
    """
    first = passes(False)
    if (between := output_difference(first, passes(False))) > least:
        return (
            f"two passes of the network as it is differ by {between:.1e} of themselves, on the same random "
            "numbers: it keeps something from one pass to the next, or draws from a source of its own. "
            "Let eval mode switch that off"
        )
    if (between := output_difference(first, passes(True))) > least:
        return (
            f"the network draws random numbers in its forward pass, and others {edit} (passes on other "
            f"numbers differ by {between:.1e}), so nothing can be compared. Let it draw none in eval mode"
        )
    return ""


def refuse_shards(model: nn.Module) -> None:
    """Refuse sharded parameters, and a wrapper that would not notice new parameters."""
    if isinstance(model, DistributedDataParallel):
        raise SurgeryError(
            "the network is wrapped in DistributedDataParallel, which knows only the parameters it was "
            "given: operate on the network first, then wrap it"
        )
    for name, tensor in canonical_parameters(model):
        if hasattr(tensor, "device_mesh"):
            raise SurgeryError(f"{name} is sharded: operate on the network before fully_shard, or on a copy")


def reasons(left: Mapping[str, str]) -> str:
    """Why no gain could be moved, in a few lines."""
    if not left:
        return "it has no norms with gains"
    lines = [f"{name}: {reason}" for name, reason in list(left.items())[:4]]
    more = [f"and {len(left) - 4} more"] if len(left) > 4 else []
    none = "its only gain could not" if len(left) == 1 else f"none of its {len(left)} gains could"
    return "\n".join([f"{none} be moved", *lines, *more])


def respond(model: nn.Module, inputs: Any, *, others: bool = False) -> Response | None:
    """The response of the network in eval mode; it is left as it was. None on the meta device.

    A network that draws random numbers draws the same ones every time, or different ones with `others`.
    """
    model = unwrap(model)
    if any(tensor.is_meta for tensor in model.parameters()):
        return None
    held = {name: one for name, one in canonical_parameters(model) if one.is_floating_point()}
    dtype = _coarser(torch.float64, *(one.dtype for one in (*held.values(), *model.buffers())))
    coarsest = _Coarsest()
    weighing = torch.Generator().manual_seed(0)  # its own: the network may draw more numbers than before
    with (
        _in_eval_mode(model),
        untouched_randomness(0),
        torch.enable_grad(),
        torch.compiler.set_stance("force_eager"),
        plain_operators(),
        _recorded_products(model) as seen,
    ):
        if others:
            change_randomness(model)
        for tensor in held.values():
            tensor.requires_grad_()  # frozen ones too: they may read a gain that is not
        state = _widened(model) if dtype in HALVES else {}
        torch.clear_autocast_cache()
        with coarsest:
            try:
                returned = _called(model, inputs, state)
            except RuntimeError:
                if not state:
                    raise
                state = {}  # it casts by itself what it computes with
                seen.clear()
                returned = _called(model, inputs, state)
        tensors = {name: state.get(id(one), one) for name, one in held.items()}
        found = [one for one in tensors_in(returned) if one.is_floating_point()]
        loss = sum((_combined(one, weighing) for one in found), torch.zeros(()))
        products = [(name, one) for name, each in seen.items() for one in each]
        wanted = [*tensors.values(), *(one for _, one in products)]
        every = torch.autograd.grad(loss, wanted, allow_unused=True)
    gradients = {name: one for name, one in zip(tensors, every, strict=False) if one is not None}
    effective = dict(gradients)
    for (name, _), one in zip(products, every[len(tensors) :], strict=True):
        if one is not None:  # a weight may be computed several times in one pass
            effective[name] = effective[name] + one if name in effective else one
    outputs = tuple(one.detach() for one in found)
    return Response(outputs, _coarser(dtype, coarsest.dtype), gradients, effective)


def output_difference(before: Sequence[Tensor], after: Sequence[Tensor]) -> float:
    """The largest difference, relative to the largest output; infinite outputs must stay the same.

    >>> output_difference([torch.tensor([4.0, -torch.inf])], [torch.tensor([3.0, -torch.inf])])
    0.25
    """
    worst = 0.0
    if len(before) != len(after):
        return math.inf
    for one, other in zip(before, after, strict=True):
        finite = one.isfinite()
        if one.shape != other.shape or not torch.equal(one[~finite], other[~finite]):
            return math.inf
        difference = _largest(other[finite].double() - one[finite].double())
        worst = max(worst, difference / max(_largest(one[finite]), 1e-300))
    return worst


def _gradient_difference(
    measured: Mapping[str, Tensor], expected: Mapping[str, Tensor], dtype: torch.dtype
) -> float:
    """The largest difference between gradients, relative to the gradient with respect to the same tensor.

    Gradients that are zero but for rounding, as that of a key's bias, are measured by the largest of all.
    """
    norms = {name: one.double().norm().item() for name, one in measured.items()}
    least = max(1e-3, torch.finfo(dtype).eps ** 0.5) * max(norms.values(), default=0.0)
    found: list[float] = []
    for name, one in measured.items():
        if name in expected:
            difference = (expected[name].double() - one.double()).norm().item()
            found.append(difference / max(norms[name], least, 1e-300))
    return math.nan if any(map(math.isnan, found)) else max(found, default=0.0)


def _combined(output: Tensor, generator: torch.Generator) -> Tensor:
    """A random combination of the finite entries of an output."""
    wide = output.to(torch.promote_types(output.dtype, torch.float32))
    wide = torch.where(wide.isfinite(), wide, 0.0)
    weights = torch.randn(wide.shape, dtype=wide.dtype, generator=generator).to(wide.device)
    return (wide * weights).sum().cpu() / max(wide.numel(), 1) ** 0.5


@contextmanager
def _in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Eval mode; modes, buffers, generators and what is frozen are restored at the end."""
    frozen = [one for one in model.parameters() if not one.requires_grad]
    buffers = [(one, one.detach().clone()) for one in model.buffers()]
    try:
        with evaluated(model), kept_randomness(model):
            yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)
        for buffer, value in buffers:
            buffer.copy_(value)


def _widened(model: nn.Module) -> dict[int, Tensor]:
    """By id of a parameter or a buffer in halves: the same in float32."""
    return {
        id(one): one.detach().float().requires_grad_(one.requires_grad)
        for one in (*model.parameters(), *model.buffers())
        if one.dtype in HALVES
    }


def _called(model: nn.Module, inputs: Any, state: Mapping[int, Tensor]) -> Any:
    """What the network returns, with other tensors in the place of some of its own."""
    if not state:
        return call(model, inputs)
    named = (*model.named_parameters(), *model.named_buffers())
    stand_ins = {name: state[id(one)] for name, one in named if id(one) in state}
    inputs = tree_map(
        lambda one: one.float() if isinstance(one, Tensor) and one.dtype in HALVES else one, inputs
    )
    return with_tensors(model, stand_ins, call, inputs)


def _coarser(*dtypes: torch.dtype) -> torch.dtype:
    return max((dtype for dtype in dtypes if dtype in TOLERANCE), key=list(TOLERANCE).index)


class _Coarsest(TorchDispatchMode):
    """Records the coarsest dtype that comes out of an operation."""

    def __init__(self) -> None:
        super().__init__()
        self.dtype = torch.float64

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        leaves = [leaf.dtype for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.dtype = _coarser(self.dtype, *leaves)
        return result


@contextmanager
def _recorded_products(model: nn.Module) -> Iterator[dict[str, list[Tensor]]]:
    """The products of weights and gains with scale vectors in a forward pass, by plain name."""
    seen: dict[str, list[Tensor]] = {}

    def keeping(name: str) -> Callable[[nn.Module, Any, Tensor], None]:
        def keep(how: nn.Module, args: Any, made: Tensor) -> None:
            if made.requires_grad:
                seen.setdefault(name, []).append(made)

        return keep

    parametrized = {**scaled_weights(model), **scaled_gains(model)}
    hooks = [how.register_forward_hook(keeping(name)) for name, (_, how) in parametrized.items()]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _largest(tensor: Tensor) -> float:
    return tensor.double().abs().max().item() if tensor.numel() else 0.0
