"""Candidate blocks, really run in the stream of a network, at all points at once.

A closed block returns the stream it is given, so that every candidate sees the stream of the network as it
is, and the network computes what it computes without them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from theodolite.anatomy.names import canonical_modules
from theodolite.probes.signal.sites import Closers, GainSite, MapSite, Site, is_map
from theodolite.surgery import Closer, Point, make_block
from theodolite.surgery.passing import Call, watched

AGREEMENT = {torch.float64: 1e-9, torch.float32: 1e-4}
"""How far a vector that multiplies channels may be from doing so, in parts of the largest output."""


class Listener(Protocol):
    """Is told the gradients that a backward pass brings."""

    def at_site(self, candidate: Candidate, site: Site, gradient: Tensor, features: Tensor) -> None:
        """The gradient by a site's output, and what the site was given."""

    def in_stream(self, candidate: Candidate, gradient: Tensor) -> None:
        """The gradient by the stream at the point."""


class Candidate:
    """A closed block at a point, a network's own but for what closes it."""

    def __init__(self, model: nn.Module, point: Point, fresh: nn.Module | None) -> None:
        self.point = point
        self.block = make_block(model, point, fresh).eval().requires_grad_(False)
        if fresh is None:
            _share(self.block, dict(canonical_modules(model))[point.like], point.closers)
        self.sites: list[Site] = []
        self.channels = 0
        self.zeros = 0.0
        """The share of the stream that is exactly zero, on the units of the trial."""
        self.entries = 0
        """How many numbers the stream at the point has, in the pass that runs."""
        self.shares: dict[str, float] = {}
        """By holder: how many its output has, in parts of them; always equal if units have equally many."""
        self.uneven: set[str] = set()
        """Holders of which it has changed."""
        self.channel = -1
        self.unit = 0
        """The dimensions of the stream in which channels and units run."""
        modules = dict(canonical_modules(self.block))
        grouped: dict[str, dict[str, Closer]] = {}
        for closer in point.closers:
            holder, _, own = closer.name.rpartition(".")
            grouped.setdefault(holder, {})[own] = closer
        self.holders: dict[str, tuple[nn.Module, Closers]] = {
            holder: (modules[holder], closers) for holder, closers in grouped.items()
        }
        self.known: dict[str, Site | None] = {}
        """By holder: its site, or None where there is none; missing until it was called."""
        for tensor in self.whole.values():
            tensor.requires_grad_()

    @property
    def whole(self) -> dict[str, Tensor]:
        """By closer: the tensors whose gradient only autograd itself can tell."""
        return {
            closer.name: getattr(module, own)
            for holder, (module, closers) in self.holders.items()
            if self.known.get(holder) is None
            for own, closer in closers.items()
        }

    @property
    def outputs(self) -> int:
        """How many channels the closers make; 0 if they do not tell."""
        vectors = [tensor.numel() for tensor in self.whole.values() if tensor.ndim == 1]
        return next((one for one in [*(site.outputs for site in self.sites), *vectors]), 0)

    def give_up(self, holder: str) -> None:
        """Leave what a module holds to autograd."""
        site = self.known.get(holder)
        self.known[holder] = None
        self.uneven.discard(holder)
        if site is None:
            return
        self.sites.remove(site)
        module, closers = self.holders[holder]
        vars(module).pop("forward", None)  # that of a silent map
        for own, closer in closers.items():
            tensor = getattr(module, own)
            module._parameters[own] = nn.Parameter(torch.full_like(tensor, closer.closed))

    def settle(self) -> None:
        """What was not called so far is left to autograd."""
        for holder in self.holders.keys() - self.known.keys():
            self.known[holder] = None


class Candidates:
    """All of them."""

    def __init__(self, model: nn.Module, points: Sequence[Point], fresh: nn.Module | None) -> None:
        self.each = [Candidate(model, point, fresh) for point in points]
        self.leaves: list[Tensor] = []
        self.listener: Listener | None = None
        self._modules = dict(canonical_modules(model))

    @contextmanager
    def in_stream(self) -> Iterator[None]:
        """Whenever the network runs, they run in it."""
        with ExitStack() as stack:
            for candidate in self.each:
                template = self._modules[candidate.point.like]
                change = self._running(candidate)
                stack.enter_context(watched(template, change, follows=candidate.point.follows))
                for holder, (module, _) in candidate.holders.items():
                    handle = module.register_forward_hook(self._closing(candidate, holder))
                    stack.callback(handle.remove)
            yield

    @contextmanager
    def heard_by(self, listener: Listener) -> Iterator[None]:
        """Gradients of backward passes are told to the listener; there are no leaves at the end."""
        self.listener = listener
        try:
            yield
        finally:
            self.listener = None
            self.leaves.clear()

    def backward(self, loss: Tensor) -> None:
        """Bring the gradients of a loss; to no other tensors than to those of the candidates."""
        wanted = [*self.leaves, *(one for candidate in self.each for one in candidate.whole.values())]
        torch.autograd.backward(loss, inputs=[one for one in wanted if one.requires_grad])
        self.leaves.clear()

    def _running(self, candidate: Candidate) -> Callable[[Call, Tensor], Tensor | None]:
        def change(call: Call, stream: Tensor) -> Tensor | None:
            candidate.entries = stream.numel()
            returned: Tensor = call.run(candidate.block, stream)
            candidate.channel = _channel(returned, candidate.outputs)
            if not candidate.channels:
                candidate.zeros = float((returned == 0).double().mean())
            candidate.channels = returned.shape[candidate.channel]
            if returned.requires_grad:
                returned.register_hook(lambda gradient: self._told(candidate, gradient))
            return returned

        return change

    def _told(self, candidate: Candidate, gradient: Tensor) -> None:
        if self.listener is not None:
            with _full_precision(gradient):
                self.listener.in_stream(candidate, gradient)

    def _closing(self, candidate: Candidate, holder: str) -> Callable[[nn.Module, Any, Any], Tensor | None]:
        def close(module: nn.Module, args: tuple[Any, ...], output: Any) -> Tensor | None:
            if holder not in candidate.known:
                _, closers = candidate.holders[holder]
                site = candidate.known[holder] = make_site(module, closers, args, output)
                if site is not None:
                    candidate.sites.append(site)
                    for own in closers:
                        getattr(module, own).requires_grad_(False)
                if isinstance(site, GainSite):
                    output = module.forward(*args)  # with an open gain
                elif isinstance(site, MapSite) and not site.convolves:
                    silence(module, output)
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
                if self.listener is not None and gradient is not None and holder not in candidate.uneven:
                    with _full_precision(gradient):
                        self.listener.at_site(candidate, site, gradient, features)

            leaf.register_post_accumulate_grad_hook(arrived)
            self.leaves.append(leaf)
            return leaf

        return close


def silence(module: nn.Module, output: Tensor) -> None:
    """Let a closed linear map make zeros without a product, as many and of the dtype that it made."""
    outputs, dtype = output.shape[-1], output.dtype

    def zeros(features: Tensor) -> Tensor:
        return features.new_zeros((*features.shape[:-1], outputs), dtype=dtype)

    module.forward = zeros


def make_site(module: nn.Module, closers: Closers, args: tuple[Any, ...], output: Any) -> Site | None:
    """What kind of site a module is, which was called with some arguments; None if it is none.

    The gain of a site is left open: 1, so that the module's output are the features.
    """
    if not isinstance(output, Tensor) or not args or not isinstance(args[0], Tensor):
        return None
    if is_map(module):
        return MapSite(module, closers) if {"weight"} <= set(closers) <= {"weight", "bias"} else None
    tensors = {own: getattr(module, own) for own in closers}
    if any(module.children()) or any(tensor.ndim != 1 for tensor in tensors.values()):
        return None
    return _gain_site(module, closers, tensors, args)


@torch.no_grad()
def _gain_site(
    module: nn.Module, closers: Closers, tensors: dict[str, Tensor], args: tuple[Any, ...]
) -> GainSite | None:
    """A site if the module multiplies channels by one of the tensors and adds the other; tried out."""

    def output(**values: Tensor | float) -> Tensor:
        for own, tensor in tensors.items():  # other tensors: autograd may have a use for these
            value = torch.as_tensor(values.get(own, 0.0)).to(tensor)
            module._parameters[own] = nn.Parameter(
                value + torch.full_like(tensor, closers[own].closed), False
            )
        found: Tensor = module.forward(*args)
        return found.to(torch.promote_types(found.dtype, torch.float32))

    def agree(one: Tensor, other: Tensor) -> bool:
        rounded = one.dtype == torch.float64 and bool((other.float().double() == other).all())
        dtype = torch.float32 if rounded else tensors[gain].dtype  # computed so, whatever it is returned in
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
    return GainSite(module, closers, gain, shift, channel)


def _share(block: nn.Module, template: nn.Module, closers: Sequence[Closer]) -> None:
    """Let a copy of a block have the numbers of the block itself, but for what closes it."""
    closed = {closer.name for closer in closers}
    own = dict(canonical_modules(template))
    for prefix, module in canonical_modules(block):
        for name, tensor in module._parameters.items():
            path = f"{prefix}.{name}" if prefix else name
            other = own[prefix]._parameters.get(name) if prefix in own else None
            if (
                path not in closed
                and tensor is not None
                and other is not None
                and other.shape == tensor.shape
            ):
                module._parameters[name] = other.detach()  # type: ignore[assignment]


def _full_precision(tensor: Tensor) -> torch.autocast:
    """No autocast: it would round sums."""
    return torch.autocast(tensor.device.type, enabled=False)


def _channel(stream: Tensor, outputs: int) -> int:
    """The dimension of a stream in which channels run, of which closers make so many.

    >>> _channel(torch.zeros(2, 12, 5, 5), 12), _channel(torch.zeros(2, 5, 5, 12), 12)
    (1, -1)
    """
    if stream.ndim != 4:
        return -1
    return -1 if stream.shape[-1] == outputs != stream.shape[1] else 1
