"""Where gates or a readout start at zero, no number is shown for what has none, but why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import theodolite as th
from theodolite.probes.stream.growth import fit_growth
from theodolite.probes.stream.history import StreamHistory
from theodolite.probes.stream.stream import stream
from theodolite.workloads import Workload

from .toy_networks import COUNTING, DIFFUSION

ASLEEP = "no gradient yet: after the last block it is zero, as with a readout that starts at zero"


def everything(found: th.probes.Stream | StreamHistory) -> str:
    """All that is shown: as text, in a notebook, in figures and on a page without its scripts."""
    figure = found.figure()
    hovers = [str(drawn.get("text")) for panel in figure.panels for drawn in panel.data]
    return " ".join([str(found), found._repr_html_(), figure.alt, *hovers])


@pytest.mark.parametrize("workload", [DIFFUSION, COUNTING], ids=lambda one: one.name)
def test_a_readout_of_zeros_is_said_in_words(workload: Workload) -> None:
    model = workload.build(32, 2)
    found = stream(model, workload.loss, workload.draw(0, 0))
    shown = everything(found)
    assert "nan" not in shown
    assert f"gradient  {ASLEEP}" in str(found).replace("\n  ", " ")
    assert ASLEEP in found.figure().alt
    assert found.is_asleep


def test_gates_of_zeros_are_said_in_words() -> None:
    model = DIFFUSION.build(32, 2)
    found = stream(model, DIFFUSION.loss, DIFFUSION.draw(0, 0), skip=False)
    assert len(found.silent) == 4
    assert "no branch adds anything yet" in found.growth_in_words
    assert stream(COUNTING.build(32, 2), COUNTING.loss, COUNTING.draw(0, 0)).silent == ()


def test_a_history_says_at_which_steps_there_is_no_gradient() -> None:
    torch.manual_seed(0)
    model = DIFFUSION.build(32, 2)
    history = StreamHistory(model, DIFFUSION.loss, DIFFUSION.draw(0, 100))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(4):
        history.record(step)
        optimizer.zero_grad()
        DIFFUSION.evaluate(model, DIFFUSION.draw(0, step)).backward()
        optimizer.step()
    assert "nan" not in everything(history)
    assert f"step 0: gradient, {ASLEEP}" in str(history).replace("\n  ", " ")
    (unmeasured,) = history.figure(("skipped",)).panels
    assert {text for row in unmeasured.data[0]["text"] for text in row} == {"not measured"}
    # The first step moves the readout, the second the gates.
    assert [one.is_asleep for one in history.streams] == [True, False, False, False]
    assert [len(one.silent) for one in history.streams] == [4, 4, 0, 0]


class Parallel(nn.Module):
    """`h + f(h) + g(h)`."""

    def __init__(self) -> None:
        super().__init__()
        self.f, self.g = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.f(torch.tanh(x)) + self.g(torch.tanh(x))


class Trunk(nn.Module):
    """Blocks, and a map of the stream before each; closed branches add nothing."""

    def __init__(self, maps: list[nn.Module], *, closed: bool) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(4, 8), nn.Linear(8, 2)
        self.maps = nn.ModuleList(maps)
        self.blocks = nn.ModuleList(Parallel() for _ in maps)
        if closed:
            for one in self.blocks.parameters():
                nn.init.zeros_(one)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for through, block in zip(self.maps, self.blocks, strict=True):
            x = block(through(x))
        return self.leave(x)


class Times(nn.Module):
    """The stream times a number: as it is with 1, otherwise by a projection."""

    def __init__(self, number: float) -> None:
        super().__init__()
        self.project = None
        if number != 1:
            self.project = nn.Linear(8, 8, bias=False)
            self.project.weight.data = number * torch.eye(8)

    def forward(self, x: Tensor) -> Tensor:
        return x if self.project is None else self.project(x)


@pytest.mark.parametrize("closed", [False, True])
def test_what_shrinks_the_stream_between_branches_is_named(closed: bool) -> None:
    numbers = [1.0, 1.0, 0.25, 0.5, 4.0, 1.0]
    batch = torch.randn(16, 4), torch.arange(16) % 2
    torch.manual_seed(0)
    model = Trunk([Times(number) for number in numbers], closed=closed)
    found = stream(model, nn.functional.cross_entropy, batch, skip=False)
    by_branch = [number for through in numbers for number in (through, 1.0)]
    assert [one.carried for one in found.branches] == pytest.approx(by_branch, rel=1e-6)
    assert found.narrowing is not None
    assert (found.narrowing.block, found.narrowing.branch) == (2, 0)
    said = str(found).replace("\n  ", " ")
    assert "between   block 2, branch 0 and the branch before it, the stream shrinks to 0.25×" in said


def test_words_of_a_stream_that_changes_without_branches_agree_with_its_sizes() -> None:
    """Nothing is added, and yet the stream is an eighth of its start in the middle, and a half at the end."""
    batch = torch.randn(16, 4), torch.arange(16) % 2
    halving = Trunk([Times(number) for number in (1.0, 0.25, 0.5, 4.0)], closed=True)
    found = stream(halving, nn.functional.cross_entropy, batch, skip=False)
    assert len(found.silent) == len(found.branches)
    assert [one / found.start for one in found.profile] == pytest.approx([1, 1, 0.25, 0.125, 0.5], rel=1e-5)
    said = found.growth_in_words
    assert "as at its start" not in said
    assert said.startswith("falling (0.5× over 4 blocks)")
    assert f"smallest after block 2: {found.start / 8:.4g}" in said
    assert "no branch adds anything yet" in said
    same = stream(Trunk([Times(1.0)] * 3, closed=True), nn.functional.cross_entropy, batch, skip=False)
    assert same.growth_in_words.startswith("as at its start: no branch adds anything yet")
    assert same.narrowing is None
    assert "between" not in str(same)


class Cut(nn.Module):
    """Two blocks; the stream may start at zero, or be detached between them."""

    def __init__(self, scale: float = 1.0, cut: bool = False) -> None:
        super().__init__()
        self.enter, self.leave, self.cut = nn.Linear(4, 8, bias=False), nn.Linear(8, 2), cut
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.enter.weight.data *= scale

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        x = x + torch.tanh(self.blocks[0](x))
        x = x.detach() if self.cut else x
        return self.leave(x + torch.tanh(self.blocks[1](x)))


def test_the_first_place_without_a_number_is_named() -> None:
    batch = torch.randn(4, 4), torch.tensor([0, 1, 0, 1])
    zero = stream(Cut(scale=0.0), nn.functional.cross_entropy, batch)
    assert zero.growth_in_words == "no ratio: before the first block it is zero"
    cut = stream(Cut(cut=True), nn.functional.cross_entropy, batch)
    assert cut.gradient_in_words == "no ratio: before the first block there is none"
    assert cut.growth_in_words == "no ratio: after block 0 it is not known"
    for found in (zero, cut):
        assert "nan" not in everything(found)


@pytest.mark.parametrize("sizes", [(0.0, 1.0, 1.0), (1.0, float("nan")), (1.0, float("inf"))])
def test_a_law_without_a_ratio_says_so(sizes: tuple[float, ...]) -> None:
    many = "1 block" if len(sizes) == 2 else "2 blocks"
    assert str(fit_growth(sizes)) == f"unclear over {many}: a size is zero, not finite or missing"


class Side(nn.Module):
    """Two streams of different sizes, with branches that add nothing; one stream may be scaled, or normed."""

    def __init__(self, *, scale: float = 1.0, norm: bool = False) -> None:
        super().__init__()
        self.small, self.large, self.leave = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(16, 2)
        self.large.weight.data *= 10
        self.f, self.g = (nn.ModuleList(nn.Linear(16, 8) for _ in range(3)) for _ in range(2))
        for one in (*self.f.parameters(), *self.g.parameters()):
            nn.init.zeros_(one)
        self.scale, self.norm = scale, nn.LayerNorm(8) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        h, k = self.small(x), self.large(x)
        for f, g in zip(self.f, self.g, strict=True):
            both = torch.tanh(torch.cat([h, k], -1))
            h, k = h + f(both), self.norm(self.scale * k + g(both))
        return self.leave(torch.cat([h, k], -1))


CLOSED = "no branch adds anything yet, as with gates that start at zero"
CAUSE = "what changes it is no branch, such as a norm, a projection of the skip or a factor"


def test_two_streams_that_nothing_changes_are_as_at_their_start(tmp_path: Path) -> None:
    """They differ from each other, which is no change."""
    batch = torch.randn(16, 4), torch.arange(16) % 2
    found = stream(Side(), nn.functional.cross_entropy, batch, skip=False)
    assert found.branches[1].stream > 5 * found.branches[0].stream
    assert len(found.silent) == len(found.branches) == 6
    assert found.growth_in_words == f"as at its start: {CLOSED}"
    read = th.probes.Stream.load(found.save(tmp_path / "two.json"))
    assert str(read) == str(found)


@pytest.mark.parametrize("changed", [{"scale": 0.5}, {"norm": True}], ids=str)
def test_of_two_streams_no_ratio_is_told_where_one_changes(changed: dict[str, Any]) -> None:
    batch = torch.randn(16, 4), torch.arange(16) % 2
    found = stream(Side(**changed), nn.functional.cross_entropy, batch, skip=False)
    assert len(found.silent) == len(found.branches)
    assert found.growth_in_words == f"{CLOSED}: {CAUSE}"


def test_a_norm_after_branches_that_add_nothing_still_changes_the_stream() -> None:
    class PostNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.leave, self.norm = nn.Linear(4, 8), nn.Linear(8, 2), nn.LayerNorm(8)
            self.f, self.g = nn.Linear(8, 8), nn.Linear(8, 8)
            self.enter.weight.data *= 10
            for one in (*self.f.parameters(), *self.g.parameters()):
                nn.init.zeros_(one)

        def forward(self, x: Tensor) -> Tensor:
            x = self.enter(x)
            x = self.norm(x + torch.tanh(self.f(x)))
            return self.leave(self.norm(x + torch.tanh(self.g(x))))

    batch = torch.randn(16, 4), torch.arange(16) % 2
    found = stream(PostNorm(), nn.functional.cross_entropy, batch, skip=False)
    assert found.start > 2
    assert [(one.stream, one.carried) for one in found.branches] == [(pytest.approx(1, rel=1e-3), 1.0)] * 2
    assert f"{CLOSED}: {CAUSE}" in found.growth_in_words
    assert "as at its start" not in found.growth_in_words
