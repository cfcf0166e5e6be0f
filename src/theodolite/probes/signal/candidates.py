"""Candidate blocks that run in the stream of a network, at all points at once.

A closed block returns its input, so every candidate sees the stream of the unchanged network.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from theodolite.anatomy.names import canonical_modules
from theodolite.probes.signal.sites import GainSite, MapSite, OutputTensors, Site, is_map
from theodolite.surgery import InsertionPoint, OutputTensor, make_block
from theodolite.surgery.blocks import BlockCall, watched

AGREEMENT = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Relative error up to which a vector counts as multiplying channels."""


class Candidate:
    """A closed block at a point. It shares all tensors with the network but those that close it."""

    def __init__(self, model: nn.Module, point: InsertionPoint, fresh: nn.Module | None) -> None:
        self.point = point
        self.block = make_block(model, point, fresh).eval().requires_grad_(False)
        if fresh is None:
            _share(self.block, dict(canonical_modules(model))[point.like], point.outputs)
        self.sites: list[Site] = []
        self.channels = 0
        self.zeros = 0.0
        """The fraction of the stream that is exactly zero, on the examples of the trial."""
        self.entries = 0
        """The number of entries of the stream at the point in the current pass."""
        self.shares: dict[str, float] = {}
        """By holder: the entries of its output relative to these; constant if examples have equally many."""
        self.uneven: set[str] = set()
        """Holders whose share has changed."""
        self.channel, self.example = -1, 0
        """The dimensions of the stream that hold channels and examples."""
        modules = dict(canonical_modules(self.block))
        grouped: dict[str, dict[str, OutputTensor]] = {}
        for tensor in point.outputs:
            holder, _, own = tensor.name.rpartition(".")
            grouped.setdefault(holder, {})[own] = tensor
        self.holders: dict[str, tuple[nn.Module, OutputTensors]] = {
            holder: (modules[holder], tensors) for holder, tensors in grouped.items()
        }
        self.known: dict[str, Site | None] = {}
        """By holder: its site, or None if it has none; missing until the holder is called."""
        for parameter in self.whole.values():
            parameter.requires_grad_()

    @property
    def whole(self) -> dict[str, Tensor]:
        """By name: the output tensors whose gradient comes from autograd, not from a site."""
        return {
            tensor.name: getattr(module, own)
            for holder, (module, tensors) in self.holders.items()
            if self.known.get(holder) is None
            for own, tensor in tensors.items()
        }

    @property
    def width(self) -> int:
        """The number of channels that the output tensors make; 0 if it is not known."""
        vectors = [tensor.numel() for tensor in self.whole.values() if tensor.ndim == 1]
        return next((one for one in [*(site.channels for site in self.sites), *vectors]), 0)

    def give_up(self, holder: str) -> None:
        """Leave the tensors of a module to autograd."""
        site = self.known.get(holder)
        self.known[holder] = None
        self.uneven.discard(holder)
        if site is None:
            return
        self.sites.remove(site)
        module, tensors = self.holders[holder]
        vars(module).pop("forward", None)  # set by `_return_zeros`
        for own, tensor in tensors.items():
            module._parameters[own] = nn.Parameter(torch.full_like(getattr(module, own), tensor.closed))


Listener = Callable[[Candidate, Tensor, Site | None, Tensor], None]
"""Called in a backward pass with a candidate, the gradient with respect to a site's output, the site, and the
features that it was given; with the gradient of the stream at the point, None, and that gradient again."""


class Candidates:
    """The candidates at all points."""

    def __init__(self, model: nn.Module, points: Sequence[InsertionPoint], fresh: nn.Module | None) -> None:
        self.each = [Candidate(model, point, fresh) for point in points]
        self.leaves: list[Tensor] = []
        self._listener: Listener
        self._modules = dict(canonical_modules(model))

    @contextmanager
    def in_stream(self) -> Iterator[None]:
        """Run the candidates whenever the network runs."""
        with ExitStack() as stack:
            for candidate in self.each:
                template = self._modules[candidate.point.like]
                change = self._running(candidate)
                stack.enter_context(watched(template, change, follows=candidate.point.follows))
                for holder, (module, _) in candidate.holders.items():
                    handle = module.register_forward_hook(self._closing(candidate, holder))
                    stack.callback(handle.remove)
            yield

    def backward(self, loss: Tensor, listener: Listener) -> None:
        """Compute the gradients of a loss with respect to the candidates' tensors only."""
        wanted = [*self.leaves, *(one for candidate in self.each for one in candidate.whole.values())]
        self._listener = listener
        torch.autograd.backward(loss, inputs=[one for one in wanted if one.requires_grad])
        self.leaves.clear()

    def give_up_uneven(self) -> None:
        """Leave modules that were called on some rows of some examples to autograd, and forget all sums."""
        for candidate in self.each:
            for holder in tuple(candidate.uneven):
                candidate.give_up(holder)
            for site in candidate.sites:
                site.clear()
            for tensor in candidate.whole.values():
                tensor.grad = None

    def _running(self, candidate: Candidate) -> Callable[[BlockCall, Tensor], Tensor | None]:
        def change(call: BlockCall, stream: Tensor) -> Tensor | None:
            candidate.entries = stream.numel()
            returned: Tensor = call.run(candidate.block, stream)
            candidate.channel = _channel(returned, candidate.width)
            if not candidate.channels:
                candidate.zeros = float((returned == 0).double().mean())
            candidate.channels = returned.shape[candidate.channel]
            if returned.requires_grad:
                returned.register_hook(lambda gradient: self._hear(candidate, gradient, None, gradient))
            return returned

        return change

    def _hear(self, candidate: Candidate, gradient: Tensor, site: Site | None, features: Tensor) -> None:
        with torch.autocast(gradient.device.type, enabled=False):  # it would round sums
            self._listener(candidate, gradient, site, features)

    def _closing(self, candidate: Candidate, holder: str) -> Callable[[nn.Module, Any, Any], Tensor | None]:
        def close(module: nn.Module, args: tuple[Any, ...], output: Any) -> Tensor | None:
            if holder not in candidate.known:
                _, tensors = candidate.holders[holder]
                site = candidate.known[holder] = make_site(module, tensors, args, output)
                if site is not None:
                    candidate.sites.append(site)
                    for own in tensors:
                        getattr(module, own).requires_grad_(False)
                if isinstance(site, GainSite):
                    output = module.forward(*args)  # with an open gain
                elif isinstance(site, MapSite) and not site.convolves:
                    _return_zeros(module, output)
            site = candidate.known[holder]
            if site is None:
                return None
            share = output.numel() / candidate.entries
            if candidate.shares.setdefault(holder, share) != share:
                candidate.uneven.add(holder)
            features = (output if isinstance(site, GainSite) else args[0]).detach().to(output.dtype)
            leaf = torch.zeros_like(output, requires_grad=True)

            def arrived(leaf: Tensor) -> None:
                gradient, leaf.grad = leaf.grad, None
                if gradient is not None and holder not in candidate.uneven:
                    self._hear(candidate, gradient, site, features)

            leaf.register_post_accumulate_grad_hook(arrived)
            self.leaves.append(leaf)
            return leaf

        return close


def _return_zeros(module: nn.Module, output: Tensor) -> None:
    """Let a closed linear map return zeros of its output's shape and dtype without a product."""
    outputs, dtype = output.shape[-1:], output.dtype
    module.forward = lambda features: features.new_zeros(features.shape[:-1] + outputs, dtype=dtype)


def make_site(module: nn.Module, tensors: OutputTensors, args: tuple[Any, ...], output: Any) -> Site | None:
    """The site of a module that was called with some arguments; None if it is neither a map nor a gain.

    The gain of a site is set to 1, so that the module's outputs are the features.
    """
    if not isinstance(output, Tensor) or not args or not isinstance(args[0], Tensor):
        return None
    if is_map(module):
        return MapSite(module, tensors) if {"weight"} <= set(tensors) <= {"weight", "bias"} else None
    if any(module.children()) or any(getattr(module, own).ndim != 1 for own in tensors):
        return None
    return _gain_site(module, tensors, args)


@torch.no_grad()
def _gain_site(module: nn.Module, named: OutputTensors, args: tuple[Any, ...]) -> GainSite | None:
    """A site if the module multiplies channels by one tensor and adds the other, tested by running it."""
    tensors: dict[str, Tensor] = {own: getattr(module, own) for own in named}

    def output(**values: Tensor | float) -> Tensor:
        for own, tensor in tensors.items():  # new tensors: autograd may need the old ones
            value = torch.as_tensor(values.get(own, 0.0)).to(tensor)
            module._parameters[own] = nn.Parameter(value + torch.full_like(tensor, named[own].closed), False)
        found: Tensor = module.forward(*args)
        return found.to(torch.promote_types(found.dtype, torch.float32))

    def agree(one: Tensor, other: Tensor) -> bool:
        rounded = one.dtype == torch.float64 and bool((other.float().double() == other).all())
        dtype = torch.float32 if rounded else tensors[gain].dtype  # the dtype of the computation
        close = AGREEMENT.get(dtype, 3e-2) * float(one.abs().max())
        return bool((one - other).abs().max() <= close)

    ones = {own: output(**{own: 1.0}) for own in tensors}
    constant = {own: bool((found == 1).all()) for own, found in ones.items()}
    if sorted(constant.values()) not in ([False], [False, True]):
        module._parameters.update(tensors)  # type: ignore[arg-type]
        return None
    gain = next(own for own, is_constant in constant.items() if not is_constant)
    shift = next((own for own, is_constant in constant.items() if is_constant), None)
    random = {own: torch.linspace(-1, 2, tensor.numel()).to(tensor) for own, tensor in tensors.items()}
    found, channel = output(**random), -1 if ones[gain].ndim != 4 else 1
    shape = [1] * found.ndim
    shape[channel] = -1
    fits = ones[gain].shape[channel] == tensors[gain].numel()
    expected = ones[gain] * random[gain].view(shape) if fits else torch.full_like(found, torch.inf)
    if shift is not None:
        expected = expected + random[shift].view(shape)
    if not agree(expected, found):
        module._parameters.update(tensors)  # type: ignore[arg-type]
        return None
    output(**{gain: 1.0})
    return GainSite(module, named, gain, shift, channel)


def _share(block: nn.Module, template: nn.Module, outputs: Sequence[OutputTensor]) -> None:
    """Let a copy of a block share the tensors of the block, except those that close it."""
    closed = {one.name for one in outputs}
    own = dict(canonical_modules(template))
    for prefix, module in canonical_modules(block):
        for name, tensor in module._parameters.items():
            path = f"{prefix}.{name}" if prefix else name
            other = own[prefix]._parameters.get(name) if prefix in own else None
            if path in closed or tensor is None or other is None:
                continue
            if other.shape == tensor.shape:
                module._parameters[name] = other.detach()  # type: ignore[assignment]


def _channel(stream: Tensor, outputs: int) -> int:
    """The dimension of a stream that holds the channels, given their number.

    >>> _channel(torch.zeros(2, 12, 5, 5), 12), _channel(torch.zeros(2, 5, 5, 12), 12)
    (1, -1)
    """
    if stream.ndim != 4:
        return -1
    return -1 if stream.shape[-1] == outputs != stream.shape[1] else 1
