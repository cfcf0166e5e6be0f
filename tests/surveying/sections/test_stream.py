"""The findings of the stream: alarms where closed forms say so, and none where they do not."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from theodolite.core.size import Size
from theodolite.models import GPT, ResidualMLP, ResNet
from theodolite.probes.stream.readings import LargestValue
from theodolite.probes.stream.stream import stream
from theodolite.surveying import budget, short_training
from theodolite.surveying.context import SurveyContext
from theodolite.surveying.finding import Finding
from theodolite.surveying.sections.stream import gradient, headroom, measurement, section
from theodolite.surveying.sections.stream.differences import example_number
from theodolite.surveying.sections.stream.measurement import StreamMeasurement, cut
from theodolite.workloads import Workload
from theodolite.workloads.builtin import built_in

from ...probes.stream.toy_networks import COUNTING, DIFFUSION, Amplifier, timed_rows

examine = section.run


def findings(workload: Workload, size: Size | None = None) -> dict[str, Finding]:
    return {finding.code: finding for finding in examine(SurveyContext(workload, size or workload.size))}


def levels(workload: Workload, size: Size | None = None) -> dict[str, str]:
    return {code: finding.level for code, finding in findings(workload, size).items()}


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are not skipped."""
    monkeypatch.setattr(measurement, "WORK", 0.0)


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("placement", ["pre", "post", "peri"])
def test_a_transformer_with_norms_raises_no_alarm_when_it_is_new(gpt: Any, placement: str) -> None:
    found = levels(gpt(norm_placement=placement), Size(32, 6))
    assert found == dict.fromkeys(("TH521", "TH522", "TH523", "TH524"), "ok")


@pytest.mark.usefixtures("hasty")
def test_a_deep_transformer_without_norms_raises_every_alarm(gpt: Any) -> None:
    found = findings(gpt(norm_placement="none"), Size(32, 12))
    assert [found[code].level for code in ("TH521", "TH522", "TH524")] == ["warn"] * 3
    assert found["TH521"].title == "A stream that grows exponentially"
    assert found["TH521"].evidence.numbers["factor in each block"] > 1.4
    assert found["TH522"].title == "A gradient that explodes"
    assert found["TH524"].evidence.numbers["doublings of headroom"] < 0
    assert "1/L" in found["TH521"].remedy


@pytest.mark.usefixtures("hasty")
def test_a_shallow_one_is_worth_a_note(rows: Any) -> None:
    """Each block multiplies RMS² by 3/2."""
    found = findings(rows(lambda width, depth: ResidualMLP(width, depth, inputs=8, outputs=2)), Size(256, 6))
    assert found["TH521"].level == "note"
    assert found["TH521"].evidence.numbers["factor in each block"] == pytest.approx(1.5**0.5, abs=0.06)
    assert found["TH522"].level == "ok"  # 1.5³ is less than 7^1.5


@pytest.mark.usefixtures("hasty")
def test_a_new_batch_norm_is_looked_at_as_it_trains() -> None:
    """With the running statistics of a new network the stream would grow exponentially."""

    def batch(seed: int, step: int) -> tuple[Tensor, Tensor]:
        return torch.randn(16, 3, 8, 8, generator=torch.Generator().manual_seed(step)), torch.arange(16) % 10

    workload = Workload("maps", ResNet, batch, nn.functional.cross_entropy, Size(8, 4))
    assert levels(workload)["TH521"] == "ok"


class Blocks(nn.Module):
    """Residual branches `W₂ relu(W₁ x)`, through which the gradient may be cut."""

    def __init__(
        self,
        width: int,
        depth: int,
        scale: float,
        cut: bool = False,
        loud: float = 1.0,
        more: bool = False,
        factor: float = 1.0,
    ) -> None:
        super().__init__()
        self.cut, self.more, self.factor = cut, more, factor
        self.first, self.last = nn.Linear(8, width), nn.Linear(width, 2)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width, bias=False))
            for _ in range(depth)
        )
        for block in self.blocks:
            block[2].weight.data *= scale
        self.last.weight.data *= loud

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            branch = self.factor * block(x)
            x = x + (branch.detach() if self.cut else branch)
        if self.more and torch.is_grad_enabled():
            _ = x + x * 0.0  # a statistic that only training needs: the passes run different operations
        return self.last(x)


@pytest.mark.parametrize(
    "options, level, title",
    [
        ({"scale": 1.0}, "ok", "What each block contributes"),
        (
            {"scale": 0.01, "loud": 1000.0},
            "ok",
            "What each block contributes",
        ),  # 1 − cos is below 10⁻⁴, not the loss
        ({"scale": 1e-6}, "note", "Blocks that change nothing yet"),
        ({"scale": 0.0}, "ok", "What each block contributes"),  # after a few steps
        ({"scale": 0.0, "factor": 0.0}, "warn", "Branches that stay at zero"),
        ({"scale": 1.0, "cut": True}, "warn", "Branches without a gradient"),
        ({"scale": 1.0, "cut": True, "loud": 0.0}, "warn", "Branches without a gradient"),
        ({"scale": 0.0, "cut": True}, "warn", "Branches without a gradient"),
    ],
)
def test_what_blocks_are_worth(rows: Any, options: dict[str, Any], level: str, title: str) -> None:
    found = findings(rows(lambda width, depth: Blocks(width, depth, **options)))["TH523"]
    assert (found.level, found.title) == (level, title)


@pytest.mark.parametrize(
    "options, later", [({"scale": 0.0}, "TH521 TH522 TH523 TH524"), ({"loud": 0.0}, "TH522 TH523")]
)
def test_what_zeros_hide_at_the_start_is_measured_after_a_few_steps(
    rows: Any, options: dict[str, Any], later: str
) -> None:
    """Behind a readout of zeros the stream itself is there from the start, and only its gradient is not."""
    found = findings(rows(lambda width, depth: Blocks(width, depth, **{"scale": 1.0} | options)))
    assert {one.level for one in found.values()} == {"ok"}
    why = "2 of 2 branches add nothing" if "scale" in options else "no gradient reaches the stream"
    for code, one in found.items():
        if code in later:
            assert f"At 32 × 2, after 8 steps of AdamW (at the start {why}), " in one.sentence
            assert one.evidence.numbers["steps of AdamW"] == 8
            assert one.evidence.numbers["loss after the steps"] < one.evidence.numbers["loss at the start"]
        else:
            assert one.sentence.startswith("At 32 × 2 the ")
            assert "steps of AdamW" not in one.evidence.numbers


def test_without_zeros_nothing_is_trained(rows: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurement, "wake", None)
    found = findings(rows(lambda width, depth: Blocks(width, depth, 1.0)))
    assert not any("steps of AdamW" in one.evidence.numbers for one in found.values())


def test_a_readout_that_stays_at_zero_is_a_warning(rows: Any) -> None:
    def frozen(width: int, depth: int) -> Blocks:
        model = Blocks(width, depth, 1.0, loud=0.0)
        model.last.weight.requires_grad_(False)
        return model

    found = findings(rows(frozen))
    assert (found["TH523"].level, found["TH523"].title) == ("warn", "Branches without a gradient")
    assert found["TH522"].level == "note"
    assert "no gradient to follow" in found["TH522"].sentence


@pytest.mark.parametrize(
    "options", [{"scale": 0.0}, {"scale": 1.0, "loud": 0.0}, {"scale": 0.0, "loud": 0.0}]
)
def test_what_would_take_too_long_after_steps_is_measured_at_the_start(
    rows: Any, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    monkeypatch.setattr(short_training, "WORK", 1.0)
    found = findings(rows(lambda width, depth: Blocks(width, depth, **options)))
    assert found["TH523"].level == "note"
    assert "It was not measured after a few steps: 8 steps of 32 × 2 would take" in found["TH523"].sentence
    assert ("2 of 2 blocks add nothing yet" in found["TH523"].sentence) == (options["scale"] == 0)
    if "loud" in options:
        for code in ("TH522", "TH523"):
            assert "as with a readout that starts at zero" in found[code].sentence
    assert not any("nan" in one.sentence for one in found.values())


def test_a_diffusion_transformer_with_zero_gates_raises_no_alarm() -> None:
    found = findings(DIFFUSION)
    assert {code: one.level for code, one in found.items()} == dict.fromkeys(
        ("TH521", "TH522", "TH523", "TH524", "TH525"), "ok"
    )
    assert all(
        "after 8 steps of AdamW (at the start 4 of 4 branches add nothing)" in one.sentence
        for one in found.values()
    )
    assert found["TH521"].evidence.numbers["initialisations"] == 3
    assert found["TH525"].evidence.numbers["steps of AdamW"] == 8


def test_a_gpt_with_a_readout_of_zeros_raises_no_alarm() -> None:
    assert levels(COUNTING) == dict.fromkeys(("TH521", "TH522", "TH523", "TH524"), "ok")


def amplifier(rate: float, floor: float, **changes: Any) -> Workload:
    build = lambda width, depth: Amplifier(width, depth, rate, floor)  # noqa: E731
    return Workload("timed", build, changes.pop("batch", timed_rows), F.mse_loss, Size(16, 3))


def test_a_stream_that_differs_over_time_is_a_note() -> None:
    """With `(1 + t)³`, quarters of t from 0 to 1 differ by almost 8."""
    found = findings(amplifier(1.0, 0.0))["TH525"]
    assert (found.level, found.title) == ("note", "Symptoms that differ between examples")
    assert "in 4 groups of examples by input 1, " in found.sentence
    assert "th.probes.stream(…, along=t)" in found.remedy
    t = timed_rows(0, 0)[0][1].sort().values
    lowest, highest = ((1 + some) ** 3 for some in (t[:6], t[-6:]))
    assert found.evidence.rows[0]["stream"] == pytest.approx(float(lowest.mean()), rel=0.1)
    assert found.evidence.rows[-1]["stream"] == pytest.approx(float(highest.mean()), rel=0.1)
    assert found.evidence.numbers["stream, largest over smallest"] == pytest.approx(
        found.evidence.rows[-1]["stream"] / found.evidence.rows[0]["stream"]
    )


def test_a_stream_that_is_the_same_at_all_times_is_ok() -> None:
    """Its blocks multiply it by 1.5, whatever the time."""
    found = findings(amplifier(0.0, 0.5))["TH525"]
    assert (found.level, found.remedy) == ("ok", "")
    assert [row["stream"] for row in found.evidence.rows] == pytest.approx([1.5**3] * 4, rel=1e-5)
    assert found.evidence.numbers["gradient, largest over smallest"] == pytest.approx(1.0, rel=1e-5)


def test_examples_without_a_number_are_not_compared(rows: Any) -> None:
    assert "TH525" not in findings(rows(lambda width, depth: Blocks(width, depth, 1.0)))

    def constant(seed: int, step: int) -> Any:
        (x, t), targets = timed_rows(seed, step)
        return (x, torch.full_like(t, 0.5)), targets

    assert "TH525" not in findings(amplifier(1.0, 0.0, batch=constant))


@pytest.mark.parametrize("examples, groups", [(40, 4), (15, 3), (8, 2)])
def test_groups_have_at_least_four_examples(examples: int, groups: int) -> None:
    workload = amplifier(1.0, 0.0, batch=lambda seed, step: timed_rows(seed, step, examples))
    found = findings(workload)["TH525"].evidence.rows
    assert len(found) == groups
    assert min(row["examples"] for row in found) >= 4


def test_too_few_examples_are_said() -> None:
    workload = amplifier(1.0, 0.0, batch=lambda seed, step: timed_rows(seed, step, 7))
    found = findings(workload)["TH525"]
    assert found.level == "note"
    assert "the batch has 7 examples, and two groups need 8" in found.sentence


IMAGES, TIMES = torch.zeros(4, 3, 2, 2), torch.arange(4.0)


@pytest.mark.parametrize(
    "inputs, name",
    [
        ((IMAGES, TIMES), "input 1"),
        ((TIMES, IMAGES), "input 0"),
        ({"sample": IMAGES, "timestep": TIMES, "label": torch.arange(4)}, "input 'timestep'"),
        # Positions of tokens, which all examples share.
        ({"sample": IMAGES, "ids": torch.zeros(6, 3), "timestep": TIMES}, "input 'timestep'"),
        ({"sample": IMAGES, "ids": torch.zeros(6, 3), "frequencies": torch.arange(6.0)}, None),
        ((IMAGES, TIMES.long()), None),  # may be a class
        ((IMAGES, torch.arange(3.0)), None),  # not the examples'
        ((IMAGES, TIMES[:, None]), None),
        ((TIMES, TIMES), None),  # nothing else has examples
        (IMAGES, None),
        (TIMES, None),
    ],
)
def test_a_number_of_the_examples_is_found_by_its_shape(inputs: Any, name: str | None) -> None:
    found = example_number((inputs, torch.zeros(4)))
    assert (None if found is None else found[0]) == name


def test_a_branch_that_was_not_found_again_is_not_called_dead(rows: Any) -> None:
    found = findings(rows(lambda width, depth: Blocks(width, depth, 1.0, more=True)))["TH523"]
    assert (found.level, found.title) == ("note", "What each block contributes")
    assert "it is not known whether 2 branches have a gradient" in found.sentence
    assert "values were not found again in a second pass" in found.sentence


def seen(**changes: Any) -> StreamMeasurement:
    """A stream of four blocks, with the numbers given in place of its own."""
    batch = torch.randn(4, 8), torch.arange(4) % 2
    model = Blocks(16, 4, 1.0)
    found = stream(model, nn.functional.cross_entropy, batch, skip=False)
    every = [dict(changes.pop(str(block), {})) for block in range(4)]
    branches = tuple(replace(one, **new) for one, new in zip(found.branches, every, strict=True))
    return StreamMeasurement(
        replace(found, branches=branches, **changes), Size(16, 4), "Here", 4, found.growth, model, batch
    )


@pytest.mark.parametrize(
    "ratio, level", [(5**1.4, "ok"), (5**1.6, "note"), (1 / 5**1.6, "note"), (1001, "warn")]
)
def test_a_gradient_is_measured_by_a_power_of_depth(ratio: float, level: str) -> None:
    assert gradient(seen(start_gradient=ratio, **{"3": {"stream_gradient": 1.0}})).level == level


@pytest.mark.parametrize("times, level", [(1 / 2.9, "ok"), (1 / 3.1, "note"), (3.1, "ok")])
def test_norms_make_a_gradient_larger_towards_the_start(times: float, level: str) -> None:
    found = gradient(seen(start_gradient=times, **{"3": {"stream_gradient": 1.0}}))
    assert found.level == level
    assert ("no more than expected of 4 blocks" in found.sentence) == (times > 1)
    assert (found.title == "A gradient that vanishes") == (level == "note")


def test_the_ends_of_different_streams_are_compared_less_strictly() -> None:
    ends: dict[str, Any] = {"start_gradient": 1 / 5, "3": {"stream_gradient": 1.0}}
    layout = seen().stream.layout
    assert layout is not None
    assert gradient(seen(**ends)).level == "note"
    assert gradient(seen(layout=replace(layout, streams=(0, 0, 1, 1)), **ends)).level == "ok"


class Narrowed(nn.Module):
    """Pre-norm branches, and a stream that passes through a projection of it and of a skip on its way."""

    def __init__(self, width: int, depth: int, number: float) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, width), nn.Linear(width, 2)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width, bias=False)) for _ in range(depth)
        )
        self.join = nn.Linear(2 * width, width, bias=False)
        self.join.weight.data = number * torch.eye(width).repeat(1, 2) / 2

    def forward(self, x: Tensor) -> Tensor:
        x = kept = self.first(x)
        for number, block in enumerate(self.blocks):
            if number == len(self.blocks) // 2:
                x = self.join(torch.cat([x, kept], -1))
            x = x + 0.1 * block(x)
        return self.last(x)


@pytest.mark.parametrize("number, level", [(0.05, "note"), (1.0, "ok")])
def test_where_a_stream_is_narrowed_by_no_branch_is_said(rows: Any, number: float, level: str) -> None:
    """Half of the gradient goes around the first blocks, and the rest is multiplied as the stream is."""
    found = findings(rows(lambda width, depth: Narrowed(width, depth, number)), Size(64, 6))
    place = "Between block 3, branch 0 and the branch before it, the stream shrinks to 0.05 of its size"
    assert (found["TH522"].level, found["TH521"].level) == (level, "ok")
    assert [place in found[code].sentence for code in ("TH521", "TH522")] == [level == "note"] * 2
    if level == "note":
        assert "smaller than after the last. With norms it would be larger." in found["TH522"].sentence
        assert "as large as its input" in found["TH522"].remedy


@pytest.mark.parametrize("doublings, level", [(4.1, "ok"), (3.9, "note"), (0.1, "note"), (-0.1, "warn")])
def test_four_doublings_are_room_enough(doublings: float, level: str) -> None:
    found = headroom(seen(largest=LargestValue(65504 / 2**doublings, "mm", "block 0, branch 0")))
    assert found.level == level


def test_values_that_are_no_numbers_are_an_overflow() -> None:
    found = headroom(seen(largest=LargestValue(math.inf, "mm", "block 0, branch 0")))
    assert (found.level, found.title) == ("warn", "Values that overflow")
    assert "values that are not finite (first mm, block 0, branch 0)" in found.sentence


def test_the_massive_entry_that_is_named_is_one() -> None:
    high, massive = {"largest": 1.0, "peak": 5000.0}, {"largest": 200.0, "peak": 1500.0, "peak_at": (0, 7)}
    assert (
        "Block 2 has a massive entry at (0, 7), 1500 times"
        in headroom(seen(**{"0": high, "2": massive})).sentence
    )


def test_a_mixture_says_why_no_block_was_left_out(gpt: Any) -> None:
    found = findings(gpt(residual="routed"))["TH523"]
    assert "no branch was skipped" in found.sentence
    assert "too long" not in found.sentence


def test_a_massive_entry_is_worth_a_note(gpt: Any) -> None:
    workload = gpt()

    def build(width: int, depth: int) -> nn.Module:
        model = GPT(width, depth, vocab=32, context=8, head_dim=16)
        nn.init.constant_(model.embed.weight[:, 3], 5000.0)
        return model

    found = findings(Workload("massive", build, workload.batch, workload.loss, Size(32, 2)))["TH524"]
    assert found.level == "note"
    assert "massive entry at (" in found.sentence
    assert ", 3)" in found.sentence


@pytest.mark.usefixtures("hasty")
def test_no_stream_and_no_time(rows: Any) -> None:
    plain = rows(lambda width, depth: nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 2)))
    assert list(levels(plain).items()) == [("TH521", "ok")]
    assert "too long" in findings(rows(lambda width, depth: Blocks(width, depth, 1.0)))["TH523"].sentence


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("seed", [1, 2])
def test_the_draw_of_the_weights_does_not_make_an_alarm(seed: int) -> None:
    """By these draws alone, four pre-norm blocks would multiply the stream."""
    workload = built_in()["gpt-sotu"]
    site = SurveyContext(workload, workload.size, seed)
    alone = stream(site.build(), workload.loss, cut(site.batch), skip=False).growth
    assert alone.kind == "exponential"
    found = next(iter(examine(site)))
    assert (found.code, found.level) == ("TH521", "ok")


def test_whether_blocks_are_skipped_does_not_depend_on_the_clock(
    gpt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The built-in GPT is far from the limit, and a deep network beyond it."""
    monkeypatch.setattr(budget, "clock", lambda: next(hours))
    hours = itertools.count(0.0, 3600.0)
    found = findings(gpt(), Size(32, 2))["TH523"].sentence
    assert "Leaving out one of 2 blocks changes the loss by" in found


def test_a_large_network_is_looked_at_in_small(rows: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurement, "MOST_PARAMETERS", 1000)
    build = lambda width, depth: Blocks(width, depth, 1.0)  # noqa: E731
    found = findings(rows(build), Size(256, 3))["TH521"]
    assert found.sentence.startswith("At 64 × 8, a smaller network of the trials,")
