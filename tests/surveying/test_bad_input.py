"""What is wrong with the workload itself is one clear error of use."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from theodolite import UseError, survey


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


def refusal(workload):
    with pytest.raises(UseError) as caught:
        survey(workload)
    return str(caught.value)


def test_a_build_that_ignores_width(rows):
    message = refusal(rows(lambda width, depth: Plain(16, depth)))
    assert "build ignores width" in message
    assert "build(32, 2) and build(64, 2)" in message


def test_a_build_that_fails_shows_its_own_exception(rows):
    def build(width, depth):
        raise KeyError("no such layer")

    assert refusal(rows(build)) == "workload 'mine': build(32, 2) failed: KeyError: 'no such layer'"


def test_a_build_that_fails_only_when_wider(rows):
    def build(width, depth):
        if width > 32:
            raise MemoryError("too wide")
        return Plain(width, depth)

    assert refusal(rows(build)) == "workload 'mine': build(64, 2) failed: MemoryError: too wide"


def test_a_build_that_returns_no_module(rows):
    assert "build(32, 2) returned NoneType, not a torch.nn.Module" in refusal(rows(lambda width, depth: None))


def test_a_build_without_parameters(rows):
    assert "build(32, 2) has no parameters" in refusal(rows(lambda width, depth: nn.Identity()))


def test_a_build_that_reads_values_is_no_reason_to_refuse(rows):
    def build(width, depth):
        assert torch.linspace(0, 1, depth)[-1].item() == 1.0  # cannot be read on the meta device
        return Plain(width, depth)

    assert not survey(rows(build)).at("fail")


@pytest.mark.parametrize(
    "dress",
    [
        lambda logits: {"logits": logits, "cache": None},
        lambda logits: (logits, None),
        lambda logits: Output(logits),
    ],
    ids=["dict", "tuple", "object"],
)
def test_logits_may_come_dressed(rows, dress):
    made = survey(rows(lambda width, depth: Plain(width, depth, dress)))
    assert made.anatomy["last.weight"].role == "output"
    assert not made.at("fail")


@pytest.mark.parametrize(
    "dress, described",
    [
        (lambda logits: {"scores": logits}, "a dict with the keys ['scores']"),
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


def test_a_loss_that_is_not_one_number(rows):
    def loss(logits, targets):
        return nn.functional.cross_entropy(logits, targets, reduction="none")

    assert "loss returned shape (4,)" in refusal(rows(Plain, loss=loss))


def test_a_file_that_is_not_there():
    with pytest.raises(UseError, match=r"nowhere\.py is not there"):
        survey("nowhere.py:workload")


def test_what_is_no_workload_at_all():
    with pytest.raises(UseError, match="a Workload or the name of one, not Linear"):
        survey(nn.Linear(2, 2))
