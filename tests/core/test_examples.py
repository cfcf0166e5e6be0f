"""Examples of batches: counted, taken, recognised, and the same in every pass."""

from __future__ import annotations

import pytest
import torch

from theodolite import UseError
from theodolite.core.examples import count_examples, each_batch, fingerprints, take


def test_examples_are_counted_taken_and_recognised() -> None:
    first = (
        {"tokens": torch.tensor([[1, 2], [3, 4]]), "positions": torch.tensor([[0, 1]])},
        torch.tensor([0, 1]),
    )
    second = {"tokens": torch.tensor([[3, 4]], dtype=torch.int32), "positions": torch.tensor([[0, 1]])}
    taken = take(first, [1])
    assert taken[0]["tokens"].tolist() == [[3, 4]]
    assert taken[0]["positions"].tolist() == [[0, 1]]
    assert taken[1].tolist() == [1]
    marks = fingerprints([(first[0]["tokens"], first[1]), (second["tokens"], torch.tensor([0]))])
    assert marks[1] == marks[2] != marks[0], "the same numbers, stored otherwise"
    assert count_examples([first, (second, torch.tensor([0]))]) == 3
    a, b = torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0], [2.0]])
    assert len({*fingerprints((a, torch.zeros(1))), *fingerprints((b, torch.zeros(2)))}) == 3


def test_two_pairs_are_two_batches() -> None:
    pair = torch.zeros(2, 3), torch.zeros(2)
    assert count_examples([pair, pair]) == count_examples((pair, pair)) == 4
    assert count_examples(list(pair)) == 2
    two_inputs = (torch.zeros(2, 3), torch.zeros(2, 1)), torch.zeros(2)
    assert len(list(each_batch(two_inputs))) == 1


def test_bad_batches_are_refused() -> None:
    pair = torch.zeros(2, 2), torch.zeros(2, 1)
    with pytest.raises(UseError, match="the batches are empty"):
        count_examples([])
    with pytest.raises(UseError, match="can be iterated more than once"):
        count_examples(one for one in [pair])
    with pytest.raises(UseError, match="not pairs"):
        count_examples([(torch.zeros(2),)])  # type: ignore[list-item]
