"""What is wrong with the workload itself is one clear error of use."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

from theodolite import UseError, dissect, survey


class Plain(nn.Module):
    def __init__(self, width, depth, dress=lambda logits: logits):
        super().__init__()
        self.first, self.last, self.dress = nn.Linear(8, width), nn.Linear(width, 2), dress

    def forward(self, x):
        return self.dress(self.last(self.first(x).relu()))


@dataclass
class Output:
    logits: torch.Tensor
    cache: None = None


def refusal(workload, **options):
    with pytest.raises(UseError) as caught:
        survey(workload, **options)
    return str(caught.value)


def test_a_build_that_ignores_width(rows):
    message = refusal(rows(lambda width, depth: Plain(16, depth)))
    assert "build ignores width" in message
    assert "build(32, 2) and build(64, 2)" in message


def test_a_build_that_fails_shows_its_own_exception(rows):
    def build(width, depth):
        raise KeyError("no such layer")

    assert refusal(rows(build)) == (
        "workload 'mine': build(width=32, depth=2) failed: KeyError: 'no such layer'"
    )


def test_a_build_that_fails_only_when_wider(rows):
    def build(width, depth):
        if width > 32:
            raise MemoryError("too wide")
        return Plain(width, depth)

    assert refusal(rows(build)) == ("workload 'mine': build(width=64, depth=2) failed: MemoryError: too wide")


def test_a_build_that_returns_no_module(rows):
    message = refusal(rows(lambda width, depth: None))
    assert message == "workload 'mine': build(width=32, depth=2) returned a NoneType, not a torch.nn.Module"


def test_a_build_without_parameters(rows):
    assert "build(32, 2) has no parameters" in refusal(rows(lambda width, depth: nn.Identity()))


def test_a_build_that_reads_values_is_no_reason_to_refuse(rows):
    def build(width, depth):
        assert torch.linspace(0, 1, depth)[-1].item() == 1.0  # cannot be read on the meta device
        return Plain(width, depth)

    assert not survey(rows(build), skip=["transfer", "steps"]).at("fail")


@pytest.mark.parametrize(
    "dress, skip",
    [
        (lambda logits: {"logits": logits, "cache": None}, ()),
        (lambda logits: (logits, None), ("transfer", "steps")),
        (lambda logits: Output(logits), ("transfer", "steps")),
    ],
    ids=["dict", "tuple", "object"],
)
def test_logits_may_come_dressed(rows, dress, skip):
    made = survey(rows(lambda width, depth: Plain(width, depth, dress)), skip=skip)
    assert made.anatomy["last.weight"].role == "output"
    assert not made.at("fail")


@pytest.mark.parametrize(
    "dress, described",
    [
        (lambda logits: {"one": logits, "two": logits}, "a dict with the keys ['one', 'two']"),
        (lambda logits: (logits, logits), "a tuple of 2 (Tensor, Tensor)"),
    ],
)
def test_logits_that_cannot_be_told(rows, dress, described):
    message = refusal(rows(lambda width, depth: Plain(width, depth, dress)))
    assert described in message
    assert ".logits" in message


def test_an_empty_batch(rows):
    empty = rows(Plain, batch=lambda seed, step: (torch.zeros(0, 8), torch.zeros(0)))
    assert "batch(0, 0) is empty" in refusal(empty)


def test_a_batch_that_fails(rows):
    def batch(seed, step):
        raise OSError("disk gone")

    assert refusal(rows(Plain, batch=batch)) == "workload 'mine': batch(0, 0) failed: OSError: disk gone"


def test_a_batch_the_model_cannot_read(rows):
    wrong = rows(Plain, batch=lambda seed, step: (torch.zeros(4, 5), torch.zeros(4).long()))
    message = refusal(wrong)
    assert "the model and its loss on batch(0, 0) failed: RuntimeError" in message
    assert "4x5" in message


def test_an_error_of_the_forward_pass_ends_before_what_it_was_called_with():
    """The command line prints it in one line."""
    with pytest.raises(UseError) as caught:
        dissect(nn.Linear(4, 4), torch.ones(2, 3))
    first, second = str(caught.value).split("\n")
    assert first.endswith(".")
    assert not first.endswith("..")
    assert second.startswith("It was called with ")


def test_a_loss_that_is_not_one_number(rows):
    def loss(logits, targets):
        return nn.functional.cross_entropy(logits, targets, reduction="none")

    assert "workload 'mine': loss returned a tensor of shape (4,), not" in refusal(rows(Plain, loss=loss))


@pytest.mark.parametrize("returned, described", [(0.5, "the float 0.5"), (None, "None")])
def test_a_loss_that_is_no_tensor(rows, returned, described):
    message = refusal(rows(Plain, loss=lambda logits, targets: returned))
    assert message == f"workload 'mine': loss returned {described}, not a tensor with one number"


def test_a_build_that_fails_only_when_deeper(rows):
    def build(width, depth):
        if depth > 2:
            raise ValueError("too deep")
        return Plain(width, depth)

    assert "build(width=32, depth=4) failed: ValueError: too deep" in refusal(rows(build))
    # Whichever section asks, and whether or not it is about depth.
    assert "build(width=32, depth=4) failed: ValueError: too deep" in refusal(rows(build), only=["norms"])


def test_a_forward_pass_that_fails_only_when_deeper(rows):
    def build(width, depth):
        def dress(logits):
            return logits if depth == 2 else logits.reshape(7, 7)

        return Plain(width, depth, dress)

    assert "the forward pass of Plain failed" in refusal(rows(build))


@pytest.mark.parametrize(
    "roles, words",
    [({"first.weight": "big"}, "a role is one of"), ({"second.*": "bias"}, "matches no parameter")],
)
def test_roles_that_cannot_be(rows, roles, words):
    with pytest.raises(UseError, match=words):
        survey(rows(Plain), roles=roles)


@pytest.mark.parametrize(
    "changes, words",
    [({"size": (32, 2)}, r"size is \(32, 2\)"), ({"name": 3}, "the name of a workload is 3")],
)
def test_a_workload_with_the_wrong_kind_of_thing(rows, changes, words):
    with pytest.raises(UseError, match=words):
        replace(rows(Plain), **changes)


def test_a_file_that_is_not_there():
    with pytest.raises(UseError, match=r"nowhere\.py is not there"):
        survey("nowhere.py:workload")


def test_what_is_no_workload_at_all():
    with pytest.raises(UseError, match="a Workload or the name of one, not Linear"):
        survey(nn.Linear(2, 2))
