"""Batches of another size: the same stream of examples, cut anew."""

import dataclasses
import pickle
from functools import partial

import pytest
import torch
from torch import nn

from theodolite import Size, UseError, Workload
from theodolite.workloads.batching import takes_num

USUAL = 6
POSITIONS = torch.arange(4)


def build(width, depth):
    return nn.Sequential(nn.Linear(3, width), nn.Linear(width, 2))


def rows(seed, step, num=USUAL):
    generator = torch.Generator().manual_seed(1_000_003 * seed + step)
    return torch.randn(num, 3, generator=generator), torch.randint(2, (num, 5), generator=generator)


def pair(seed, step):
    return rows(seed, step)


def drawing(seed, step, num=USUAL):
    return rows(seed, step, num)


def held(seed, step):
    return rows(77, step, 4)


def workload(batch=pair, **given):
    return Workload("mine", build, batch, nn.functional.cross_entropy, Size(8, 1), **given)


def stream(own, seed, batches=12):
    """The examples that the workload's own batches make, one after the other."""
    drawn = [own.draw(seed, step) for step in range(batches)]
    return torch.cat([x for x, _ in drawn]), torch.cat([y for _, y in drawn])


@pytest.mark.parametrize("num", [1, 2, 3, 4, 5, 7, 12, 18, 20])
def test_batches_of_any_size_are_consecutive_parts_of_one_stream(num):
    own = workload()
    inputs, targets = stream(own, seed=3)
    resized = own.with_batch(num)
    for step in range(60 // num):
        x, y = resized.draw(3, step)
        assert torch.equal(x, inputs[step * num : (step + 1) * num])
        assert torch.equal(y, targets[step * num : (step + 1) * num])
    assert not torch.equal(resized.draw(4, 0)[0], resized.draw(3, 0)[0])


def test_a_batch_k_times_as_large_is_k_of_the_usual_ones():
    own = workload()
    x, y = own.with_batch(3 * USUAL).draw(0, 2)
    assert torch.equal(x, torch.cat([own.draw(0, step)[0] for step in (6, 7, 8)]))
    assert torch.equal(y, torch.cat([own.draw(0, step)[1] for step in (6, 7, 8)]))


def test_the_usual_size_or_none_is_the_workload_itself_and_sizes_do_not_add_up():
    own = workload()
    assert own.usual_batch == USUAL
    assert own.with_batch(None) is own
    assert own.with_batch(USUAL) is own
    assert own.with_batch(4).with_batch(USUAL) is own
    twice = own.with_batch(4).with_batch(9)
    assert twice == own.with_batch(9)
    assert twice.source is own
    assert own.source is own
    assert twice.usual_batch == 9


def test_workloads_with_equal_batches_are_equal_and_have_one_hash():
    own = workload()
    assert own.with_batch(4) == own.with_batch(4) != own.with_batch(5)
    assert len({own.with_batch(4), own.with_batch(4), own.with_batch(5), own}) == 3


def test_a_workload_with_another_batch_can_be_sent_to_a_process():
    resized = workload().with_batch(9)
    again = pickle.loads(pickle.dumps(resized))
    assert again == resized
    assert torch.equal(again.draw(1, 2)[0], resized.draw(1, 2)[0])


@dataclasses.dataclass
class Points:
    places: torch.Tensor
    labels: torch.Tensor
    scale: float = 2.0


def as_dict(seed, step):
    x, y = rows(seed, step)
    return {"x": x, "positions": POSITIONS, "flag": "causal", "temperature": torch.tensor(0.5)}, y


def as_object(seed, step):
    x, y = rows(seed, step)
    return Points(x, y[:, 0]), y


@pytest.mark.parametrize("num", [2, 4, 12])
def test_inputs_in_a_dict_are_cut_and_what_has_no_row_for_each_example_stays_whole(num):
    own = workload(as_dict)
    expected, targets = stream(workload(), seed=0)
    for step in range(4):
        inputs, y = own.with_batch(num).draw(0, step)
        part = slice(step * num, (step + 1) * num)
        assert torch.equal(inputs["x"], expected[part])
        assert torch.equal(y, targets[part])
        assert torch.equal(inputs["positions"], POSITIONS)
        assert inputs["flag"] == "causal"
        assert inputs["temperature"].item() == 0.5


def test_inputs_in_an_object_are_cut():
    expected, targets = stream(workload(), seed=0)
    points, _ = workload(as_object).with_batch(8).draw(0, 1)
    assert torch.equal(points.places, expected[8:16])
    assert torch.equal(points.labels, targets[8:16, 0])
    assert points.scale == 2.0


def test_a_tensor_as_long_as_a_piece_of_a_batch_has_no_rows_all_the_same():
    """Batches of 9, and 6 are taken: the second ones are 3 and 3, as long as the positions."""

    def batch(seed, step):
        return {"x": rows(seed, step, 9)[0], "positions": torch.arange(3)}, rows(seed, step, 9)[1]

    for step in range(3):
        inputs, _ = workload(batch).with_batch(6).draw(0, step)
        assert inputs["positions"].tolist() == [0, 1, 2]
        assert inputs["x"].shape == (6, 3)


def test_a_function_with_an_argument_num_draws_that_many_itself():
    own = workload(drawing)
    assert takes_num(own.batch)
    assert own.usual_batch == USUAL
    x, y = own.with_batch(11).draw(2, 5)
    assert torch.equal(x, rows(2, 5, 11)[0])
    assert torch.equal(y, rows(2, 5, 11)[1])
    swapped = workload(lambda seed, step, shift=1, num=USUAL: rows(seed, step + shift, num))
    assert torch.equal(swapped.with_batch(2).draw(0, 0)[0], rows(0, 1, 2)[0])  # num is no third position
    assert takes_num(partial(drawing, num=7))
    assert workload(partial(drawing, num=7)).usual_batch == 7
    assert not takes_num(pair)


def test_a_function_that_does_not_draw_what_num_says_is_refused():
    with pytest.raises(UseError, match=r"'mine': batch\(0, 3, 4\) has 6 examples. Return as many"):
        workload(lambda seed, step, num=USUAL: rows(seed, step)).with_batch(4).draw(0, 3)
    wrong = workload(lambda seed, step, num=USUAL: rows(seed, step) if num == USUAL else None)
    with pytest.raises(UseError, match=r"batch\(0, 0\) returned None, not a pair"):
        wrong.with_batch(4).draw(0, 0)


def test_batches_of_unequal_sizes_are_refused_by_name():
    own = workload(lambda seed, step: rows(seed, step, USUAL if step < 2 else 5))
    resized = own.with_batch(4)
    assert len(resized.draw(0, 2)[0]) == 4  # of the second batch
    with pytest.raises(UseError, match=r"'mine': batch\(0, 2\) has 5 examples and batch\(0, 0\) 6: batches"):
        resized.draw(0, 3)


def test_sequences_of_unequal_lengths_and_batches_of_unlike_things_are_refused():
    def lengths(seed, step):
        return torch.zeros(USUAL, 3 + step), torch.zeros(USUAL)

    def changing(seed, step):
        x, y = rows(seed, step)
        return ({"x": x} if step else {"x": x, "mask": x > 0}), y

    with pytest.raises(UseError, match=r"shapes \(6, 3\) and \(6, 4\), which do not go into one batch"):
        workload(lengths).with_batch(12).draw(0, 0)
    with pytest.raises(UseError, match="'mine': its batches are not all made of the same things"):
        workload(changing).with_batch(12).draw(0, 0)


@pytest.mark.parametrize("num", [0, -3, 2.5, True, "4"])
def test_a_batch_that_is_no_count_is_refused(num):
    with pytest.raises(UseError, match="workload 'mine': the batch is "):
        workload().with_batch(num)


@pytest.mark.parametrize("given", [{}, {"held_out": held}])
def test_held_out_batches_are_the_same_whatever_is_trained_on(given):
    own = workload(**given)
    for step in range(3):
        x, y = own.with_batch(4).draw_held_out(step)
        assert torch.equal(x, own.draw_held_out(step)[0])
        assert torch.equal(y, own.draw_held_out(step)[1])


def test_steps_follow_from_tokens_and_tokens_from_steps():
    own = workload()  # 6 examples of 5 targets: 30 a step
    assert own.steps_for(Size(8, 1, tokens=300)) == 10
    assert own.steps_for(Size(8, 1, batch=12, tokens=300)) == 5
    assert own.steps_for(Size(8, 1, batch=4, tokens=330)) == 16  # 16.5, to even
    assert own.steps_for(Size(8, 1, batch=4, tokens=350)) == 18  # 17.5
    assert own.steps_for(Size(8, 1, tokens=1)) == 1
    assert own.tokens_in(10) == 300
    assert own.tokens_in(10, batch=4) == 200
    resized = own.with_batch(12)
    assert resized.steps_for(Size(8, 1, tokens=300)) == 10  # of a size without a batch: the workload's own
    assert resized.tokens_in(10) == 300
    with pytest.raises(UseError, match=r"size is 8 × 1: give the number of tokens too, as in Size"):
        own.steps_for(Size(8, 1))


def test_all_batch_sizes_see_the_same_examples_for_one_number_of_tokens():
    own = workload()
    seen = {}
    for num in (2, 3, 6, 12):
        size = Size(8, 1, batch=num, tokens=360)
        resized = own.with_batch(num)
        seen[num] = torch.cat([resized.draw(0, step)[0] for step in range(own.steps_for(size))])
    assert all(torch.equal(found, seen[6]) for found in seen.values())
    assert len(seen[6]) == 360 / 5
