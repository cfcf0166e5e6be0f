"""Training by tables is training."""

import torch
from torch.utils.flop_counter import FlopCounterMode

from theodolite.models import GPT
from theodolite.workloads import next_token_loss
from theodolite_studies.growing.training import Pupil, PupilSteps, flops_of, optimizer_of, wsd

from .tiny import LESSON, TINY, pupil_of


def test_a_course_is_training_with_adamw_on_the_windows_of_its_order():
    pupil, factors = pupil_of(), wsd(5, warmup=2, decay=2)
    plain = GPT(TINY.width, 2, context=TINY.length)
    plain.load_state_dict(pupil.model.state_dict())
    course = PupilSteps(pupil, LESSON, order="a", first=3, factors=factors)
    course.go(2)
    course.go(3)
    optimizer = torch.optim.AdamW(plain.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    for factor, start_B in zip(factors, LESSON.starts("a", 8)[3:], strict=True):
        windows = torch.stack([LESSON.train[start : start + TINY.length + 1] for start in start_B]).long()
        optimizer.param_groups[0]["lr"] = TINY.lr * factor
        optimizer.zero_grad()
        next_token_loss(plain(windows[:, :-1]), windows[:, 1:]).backward()
        optimizer.step()
    for (name, one), other in zip(plain.named_parameters(), pupil.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=2e-5, msg=name)


def test_a_copy_goes_its_own_way_with_the_same_moments():
    pupil = pupil_of()
    PupilSteps(pupil, LESSON, order=0, first=0, factors=[1.0] * 3).go(3)
    before, copied = pupil.model.readout.weight.clone(), pupil.copied()
    PupilSteps(copied, LESSON, order=0, first=3, factors=[1.0]).go(1)
    assert torch.equal(pupil.model.readout.weight, before)
    PupilSteps(pupil, LESSON, order=0, first=3, factors=[1.0]).go(1)
    assert torch.equal(pupil.model.readout.weight, copied.model.readout.weight)
    assert not torch.equal(pupil.model.readout.weight, before)


def test_what_the_optimizer_does_not_hold_is_not_trained():
    pupil = pupil_of()
    before = {name: one.clone() for name, one in pupil.model.named_parameters()}
    alone = Pupil(pupil.model, optimizer_of(pupil.model.blocks[1].parameters(), TINY, "cpu"))
    PupilSteps(alone, LESSON, order=0, first=0, factors=[1.0]).go(1)
    moved = {name for name, one in pupil.model.named_parameters() if not torch.equal(one, before[name])}
    assert moved == {name for name in before if name.startswith("blocks.1.")}


def test_flops_are_those_that_torch_counts():
    """It counts all of attention, of which half is masked: 2·depth·width·T² for each sequence."""
    model, tokens = pupil_of(3).model, torch.zeros(TINY.num, TINY.length, dtype=torch.long)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(tokens)
    masked = TINY.num * 2 * 3 * TINY.width * TINY.length**2
    if counter.get_flop_counts()["Global"].keys() == {torch.ops.aten.mm}:  # attention was not seen
        masked -= 2 * masked
    assert flops_of(TINY, TINY.width, 3) / 3 == counter.get_total_flops() - masked
