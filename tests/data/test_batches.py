"""A batch is a function of its seed and step, in every process and after any history."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from theodolite import UseError, data

from .programs.draw import drawn

PROGRAM = Path(__file__).parent / "programs" / "draw.py"


def test_another_process_with_another_history_draws_the_same_batches() -> None:
    here = [drawn(step) for step in (3, 12, 40)]
    environment = os.environ | {"PYTHONHASHSEED": "2", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(PROGRAM)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [here[2], here[0]]
    assert len(set(here)) == 3


def test_drawing_leaves_the_global_generators_alone() -> None:
    before, before_numpy = torch.get_rng_state(), np.random.get_state()[1].copy()
    data.draw_text(data.state_of_the_union(), num=4, length=32, seed=0, step=0)
    assert torch.equal(torch.get_rng_state(), before)
    assert np.array_equal(np.random.get_state()[1], before_numpy)


@pytest.mark.parametrize("other", [(0, 1), (1, 0), (10, 0), (1, 1)])
def test_neighbouring_seeds_and_steps_have_nothing_in_common(other: tuple[int, int]) -> None:
    here, there = (data.generator("sotu", *words).standard_normal(10_000) for words in ((0, 0), other))
    assert abs(np.corrcoef(here, there)[0, 1]) < 0.04  # four standard errors


def test_words_are_not_run_together() -> None:
    assert data.generator("sotu", 1, 23).random() != data.generator("sotu", 12, 3).random()


def test_an_epoch_shows_every_example_once_and_the_next_in_another_order() -> None:
    examples = data.Examples("numbers", torch.arange(60.0), torch.arange(60), classes=60)
    drawn = [data.draw_examples(examples, num=20, seed=0, step=step)[1] for step in range(6)]
    first, second = torch.cat(drawn[:3]), torch.cat(drawn[3:])
    assert first.sort().values.tolist() == second.sort().values.tolist() == list(range(60))
    assert (first == second).sum() < 10


def test_inputs_go_with_their_labels() -> None:
    examples = data.Examples("numbers", torch.arange(60.0), torch.arange(60), classes=60)
    inputs, labels = data.draw_examples(examples, num=20, seed=3, step=7)
    assert torch.equal(inputs, labels.float())


def test_windows_reach_both_ends_of_a_text() -> None:
    text = data.Text("short", torch.arange(6, dtype=torch.uint8), vocab=6)
    tokens, targets = data.draw_text(text, num=200, length=4, seed=0, step=0)
    assert set(tokens[:, 0].tolist()) == {0, 1}
    assert int(targets.max()) == 5
    assert torch.equal(targets, tokens + 1)


def test_too_little_data_is_refused() -> None:
    text = data.Text("short", torch.arange(4, dtype=torch.uint8), vocab=6)
    with pytest.raises(UseError, match="short has 4 tokens, too few for a window of 4"):
        data.draw_text(text, num=1, length=4, seed=0, step=0)
    examples = data.Examples("few", torch.arange(3.0), torch.arange(3), classes=3)
    with pytest.raises(UseError, match="few has 3 examples, too few for a batch of 4"):
        data.draw_examples(examples, num=4, seed=0, step=0)
