"""What cannot be dissected is refused: the message names the culprit and the remedy, and the remedy works."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from theodolite.anatomy import AnatomyError, UnclassifiedError, dissect
from theodolite.core.errors import UseError
from theodolite.core.size import Size

SIZE = Size(16, 2)
INPUTS = torch.zeros(3, 6)


class Net(nn.Module):
    """Two layers; `odd` is a parameter that a test does something odd with."""

    def __init__(
        self, width: int, odd: tuple[int, ...], act: Callable[[nn.Parameter, Tensor], Tensor]
    ) -> None:
        super().__init__()
        self.embed = nn.Linear(6, width)
        self.blocks = nn.ModuleList([nn.Module(), nn.Module()])
        self.blocks[1].odd = nn.Parameter(torch.ones(odd))
        self.head = nn.Linear(width, 4)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.blocks[1].odd, self.head(torch.relu(self.embed(x))))


def _refused(build: Any, inputs: Any = INPUTS, **kwargs: Any) -> str:
    kwargs.setdefault("size", None if isinstance(build, nn.Module) else SIZE)
    with pytest.raises(UseError) as caught:
        dissect(build, inputs, **kwargs)
    assert isinstance(caught.value, UseError)  # so the command line prints it without a traceback
    return str(caught.value)


def _remedy(message: str) -> dict[str, str]:
    """The `roles=` that the message says to pass."""
    found = re.search(r"roles=(\{.*?\})", message)
    assert found, message
    return eval(found[1], {})


ODD: dict[str, tuple[tuple[int, ...], Callable[[nn.Parameter, Tensor], Tensor], str]] = {
    # A matrix between two dimensions that stay.
    "nothing grows": ((5, 4), lambda odd, x: x @ odd.t(), "linear"),
    # A loss may use it, as that of a policy uses its log-variance.
    "only returned": ((7, 4), lambda odd, x: (x, odd.exp()), "returned without meeting the inputs"),
    "only returned vector": ((4,), lambda odd, x: (x, odd.exp()), "returned without meeting the inputs"),
    "an operation that does not tell": ((4,), lambda odd, x: torch.maximum(x, odd), "maximum"),
    "another such operation": ((4,), lambda odd, x: torch.atan2(x, odd), "atan2"),
}


@pytest.mark.parametrize("case", ODD.values(), ids=ODD)
def test_a_tensor_that_cannot_be_classified_is_named_and_the_remedy_works(case: Any) -> None:
    shape, act, operation = case

    def build(width: int, depth: int) -> nn.Module:
        return Net(width, shape, act)

    message = _refused(build)
    assert message.startswith("blocks.1.odd ")
    assert str(shape) in message
    assert operation in message
    roles = _remedy(message)
    assert list(roles) == ["blocks.*.odd"]
    anatomy = dissect(build, INPUTS, size=SIZE, roles=roles)
    assert anatomy["blocks.1.odd"].role == roles["blocks.*.odd"]
    if len(shape) == 1:
        assert roles["blocks.*.odd"] not in ("hidden", "output"), (
            "no matrix: the remedy should not call it one"
        )


@pytest.mark.parametrize("role", ["input", "hidden", "output", "bias", "gain", "frozen", "unused"])
def test_each_role_may_be_said_by_a_pattern(role: Any) -> None:
    def build(width: int, depth: int) -> nn.Module:
        return Net(width, (7, 4), lambda odd, x: x)

    part = dissect(build, INPUTS, size=SIZE, roles={"blocks.*.odd": role})["blocks.1.odd"]
    assert part.role == role
    assert part.shape == (7, 4)
    assert (part.width_in, part.width_out) == (False, False)


def test_a_role_that_is_said_beats_the_one_that_is_found() -> None:
    def build(width: int, depth: int) -> nn.Module:
        return Net(width, (4,), lambda odd, x: x * odd)

    anatomy = dissect(build, INPUTS, size=SIZE, roles={"embed.weight": "hidden"})
    assert anatomy["embed.weight"].role == "hidden"
    assert anatomy["embed.weight"].fan_in == 6
    assert anatomy["head.weight"].role == "output"


def test_many_unclassified_tensors_are_counted() -> None:
    class Unused(nn.Module):
        def __init__(self, width: int, depth: int) -> None:
            super().__init__()
            self.embed = nn.Linear(6, width)
            self.idle = nn.ParameterDict({f"p{n}": torch.ones(3, 2) for n in range(9)})

        def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
            return self.embed(x), [one + 0 for one in self.idle.values()]

    message = _refused(Unused)
    assert "idle.p0 has shape (3, 2)" in message
    assert "4 more" in message
    assert len(dissect(Unused, INPUTS, size=SIZE, roles={"idle.*": "hidden"})) == 11


def _fine(width: int, depth: int) -> nn.Module:
    return nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 4))


def test_a_pattern_that_matches_nothing_is_quoted() -> None:
    message = _refused(_fine, roles={"layers.*.weight": "hidden"})
    assert "'layers.*.weight'" in message
    assert "0.weight" in message  # what there is instead


def test_a_role_that_is_none_is_quoted_with_those_that_are() -> None:
    message = _refused(_fine, roles={"0.weight": "embedding"})
    assert "'embedding'" in message
    for role in ("input", "hidden", "output", "bias", "gain"):
        assert role in message


def test_a_build_that_ignores_width() -> None:
    message = _refused(lambda width, depth: _fine(12, depth))
    assert "build(16, 2)" in message
    assert "build(32, 2)" in message
    assert "ignores" in message


def test_a_build_that_fails() -> None:
    def build(width: int, depth: int) -> nn.Module:
        raise RuntimeError(f"no network of width {width}")

    message = _refused(build)
    assert "build(width=16, depth=2) failed" in message
    assert "RuntimeError: no network of width 16" in message


def test_a_build_that_fails_only_when_wider() -> None:
    def build(width: int, depth: int) -> nn.Module:
        if width > 16:
            raise ValueError("too wide")
        return _fine(width, depth)

    assert "build(width=32, depth=2) failed: ValueError: too wide" in _refused(build)


@pytest.mark.parametrize("made", [None, [nn.Linear(6, 4)], nn.Linear], ids=["None", "list", "class"])
def test_a_build_that_returns_no_module(made: Any) -> None:
    message = _refused(lambda width, depth: made)
    assert "build(width=16, depth=2) returned" in message
    assert type(made).__name__ in message
    assert "nn.Module" in message


@pytest.mark.parametrize("build", [None, 3, "gpt"])
def test_a_build_that_cannot_be_called(build: Any) -> None:
    message = _refused(build)
    assert repr(build) in message
    assert "build(width, depth)" in message


def test_a_forward_pass_that_fails() -> None:
    for build in (_fine, _fine(16, 2)):
        message = _refused(build, torch.zeros(3, 7))
        assert "Sequential" in message
        assert "(3, 7)" in message
        assert "RuntimeError" in message


def test_a_forward_pass_that_wants_other_arguments() -> None:
    message = _refused(_fine, {"tokens": INPUTS})
    assert "TypeError" in message
    assert "(3, 6)" in message


EMPTY = {
    "no examples": torch.zeros(0, 6),
    "nothing": None,
    "empty tuple": (),
    "empty dict": {},
    "no tensor": "text",
}


@pytest.mark.parametrize("inputs", EMPTY.values(), ids=EMPTY)
def test_inputs_that_hold_nothing(inputs: Any) -> None:
    assert _refused(_fine, inputs).startswith("inputs ")


def test_a_model_without_parameters() -> None:
    message = _refused(nn.Sequential(nn.ReLU(), nn.Flatten()))
    assert "Sequential has no parameters" in message
    assert "no parameters" in _refused(lambda width, depth: nn.Tanh())


def test_a_size_for_a_ready_module() -> None:
    message = _refused(_fine(16, 2), size=SIZE)
    assert "16 × 2" in message
    assert "Sequential" in message


class Listed(nn.Module):
    """One small layer for every eight features, or for every eight features less than 48."""

    def __init__(self, width: int, fewer: bool) -> None:
        super().__init__()
        self.embed = nn.Linear(6, width)
        self.parts = nn.ModuleList(nn.Linear(8, 8) for _ in range((48 - width if fewer else width) // 8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        return torch.cat([part(x[:, :8]) for part in self.parts], -1)


def test_tensors_that_a_wider_network_lacks() -> None:
    message = _refused(lambda width, depth: Listed(width, fewer=True))
    assert "build(16, 2) has the tensor parts.2.weight" in message
    assert "build(32, 2) has not" in message


def test_tensors_that_only_a_wider_network_has_are_no_hindrance() -> None:
    roles = {"parts.*.weight": "hidden"}
    anatomy = dissect(lambda width, depth: Listed(width, fewer=False), INPUTS, size=SIZE, roles=roles)
    assert len(anatomy) == 2 + 2 * 2


def test_a_tensor_that_shrinks_as_the_network_widens() -> None:
    def build(width: int, depth: int) -> nn.Module:
        return nn.Sequential(nn.Linear(6, width), nn.Linear(width, 64 // width))

    message = _refused(build)
    assert "1.weight has shape (4, 16) in build(16, 2) but (2, 32) in build(32, 2)" in message


def test_a_model_that_returns_no_tensor() -> None:
    """Without a result nothing is used for anything; silence would be a wrong answer."""

    class Mute(nn.Module):
        def __init__(self, width: int, depth: int) -> None:
            super().__init__()
            self.layer = nn.Linear(6, width)

        def forward(self, x: Tensor) -> None:
            self.layer(x)

    assert "Mute" in _refused(Mute)


def test_a_size_that_is_no_size() -> None:
    message = _refused(lambda width, depth: nn.Linear(6, width), size=(16, 2))
    assert "(16, 2)" in message
    assert "Size(width, depth)" in message


@pytest.mark.filterwarnings("ignore:.torch.jit")  # torch says that it is deprecated
def test_a_scripted_module() -> None:
    scripted = torch.jit.trace(nn.Sequential(nn.Linear(6, 8), nn.ReLU()), INPUTS)
    assert "dissect the module it was made from" in _refused(scripted)


def test_only_tensors_are_unclassified() -> None:
    """A survey reports what it cannot classify; what is wrong with the call itself it refuses."""

    def act(odd: nn.Parameter, y: Tensor) -> Tensor:
        return torch.maximum(y, odd[:4])

    with pytest.raises(UnclassifiedError):
        dissect(lambda w, d: Net(w, (7,), act), INPUTS, size=SIZE)
    with pytest.raises(AnatomyError) as caught:
        dissect(lambda w, d: Net(w, (7,), act), INPUTS, size=SIZE, roles={"nothing.*": "bias"})
    assert not isinstance(caught.value, UnclassifiedError)
