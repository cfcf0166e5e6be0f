"""Points are found where a copy of a block changes nothing; where there is none, the reason is said."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from theodolite.models import GPT, MultilevelNet, ResNet
from theodolite.surgery import SurgeryError, find_points, insert_block

from .networks import TOKENS, Branch, moved
from .test_inserting import Silent

IMAGES = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("depth", "found", "left"), [(1, [0, 1], [2, 3]), (2, [0, 1, 2, 3, 4, 5, 6], [])])
def test_resnets_by_stages(depth: int, found: list[int], left: list[int]) -> None:
    model = moved(ResNet(4, depth)).double().eval()
    points = find_points(model, IMAGES.double())
    assert [point.index for point in points.found] == found
    assert list(points.left) == [f"blocks.{each}" for each in left]
    before = model(IMAGES.double())
    for at in reversed(found):  # from behind, so that the points before stay where they are
        _, proof = insert_block(model, IMAGES.double(), at, points=points)
        assert proof.outputs == 0
    assert torch.equal(model(IMAGES.double()), before)


class Shared(nn.Module):
    """Blocks that share what ends them, or one block that is called twice."""

    def __init__(self, *, twice: bool) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(Branch(8) for _ in range(1 if twice else 2))
        self.twice = twice
        if not twice:
            self.blocks[1].down = self.blocks[0].down

    def forward(self, x: Tensor) -> Tensor:
        """Outputs."""
        x = self.first(x)
        for block in [*self.blocks, *self.blocks] if self.twice else self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize(("twice", "reason"), [(True, "called 2 times"), (False, "used elsewhere too")])
def test_what_cannot_be_copied_is_left_with_its_reason(twice: bool, reason: str) -> None:
    points = find_points(Shared(twice=twice), torch.randn(5, 4))
    assert not points.found
    assert reason in points.left["blocks.0"]


@pytest.mark.parametrize(
    ("at", "message"),
    [(9, "is no point: there are blocks.0"), ("head", "is no point"), ("blocks.2", "shape")],
)
def test_a_point_that_is_none_is_named(at: Any, message: str) -> None:
    with pytest.raises(SurgeryError, match=message):
        insert_block(ResNet(4, 1), IMAGES, at)


def test_a_list_that_is_the_network_itself() -> None:
    model = nn.Sequential(nn.Linear(4, 8), Branch(8), Branch(8), nn.Linear(8, 2))
    inputs = torch.randn(5, 4)
    before = model(inputs)
    assert [point.name for point in find_points(model, inputs).found] == ["1", "2", "3"]
    insert_block(model, inputs, 2)
    assert len(model) == 5
    assert torch.equal(model(inputs), before)


def test_blocks_of_several_branches_stay_together() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Sequential(*(nn.Sequential(Branch(8), Silent()) for _ in "12")))
    for each in model.modules():
        if isinstance(each, Silent):
            nn.init.normal_(each.up.weight)
    points = find_points(model, torch.randn(5, 4))
    assert [point.name for point in points.found] == ["1.0", "1.1", "1.2"]


def test_a_network_without_a_stream_is_refused() -> None:
    with pytest.raises(SurgeryError, match="no residual stream"):
        find_points(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), torch.randn(3, 4))


def test_looking_for_points_leaves_no_trace() -> None:
    model = ResNet(4, 1).train()
    state = copy.deepcopy(model.state_dict())
    random = torch.get_rng_state()
    find_points(model, IMAGES)
    assert model.training
    assert torch.equal(torch.get_rng_state(), random)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[name])
    assert not any(module._forward_hooks for module in model.modules())


class Dropping(Branch):
    """The stream itself is dropped out in training."""

    def forward(self, x: Tensor) -> Tensor:
        """The stream after it."""
        return nn.functional.dropout(super().forward(x), 0.5, self.training)


def test_a_block_that_drops_the_stream_out_in_training_is_none_that_adds_nothing() -> None:
    points = find_points(nn.Sequential(nn.Linear(4, 8), Dropping(8), Dropping(8)), torch.randn(5, 4))
    assert not points.found
    assert all("in training" in each for each in points.left.values())


CHANGED = "with one block more the network computes something else"
NOT_RUN = "a block there would be called 0 times in one pass, not once"


class ByNumber(nn.Module):
    """Takes its blocks from their list by number."""

    def __init__(self, numbers: tuple[int, int]) -> None:
        super().__init__()
        self.first, self.numbers = nn.Linear(4, 8), numbers
        self.blocks = nn.ModuleList([Branch(8), Branch(8)])

    def forward(self, x: Tensor) -> Tensor:
        """Outputs."""
        x = self.first(x)
        for number in self.numbers:
            x = self.blocks[number](x)
        return x


@pytest.mark.parametrize(
    ("numbers", "reasons"),
    [((0, -1), [CHANGED, NOT_RUN, CHANGED]), ((0, 1), [CHANGED, CHANGED, NOT_RUN])],
)
def test_a_list_that_is_not_run_through_has_no_points(numbers: tuple[int, int], reasons: list[str]) -> None:
    """A block that is not run changes nothing either, but could never learn."""
    points = find_points(ByNumber(numbers), torch.randn(5, 4))
    assert not points.found
    assert points.left == {f"blocks.{at}": reason for at, reason in enumerate(reasons)}


class LongSkips(nn.Module):
    """A U: what the blocks of a list return is added again later, the last or the first of it first."""

    def __init__(self, depth: int, takes: int) -> None:
        super().__init__()
        self.first, self.takes = nn.Linear(4, 8), takes
        self.blocks = nn.ModuleList(Branch(8) for _ in range(depth))
        self.behind = nn.ModuleList(nn.Linear(16, 8) for _ in range(depth))
        self.passes = 0

    def forward(self, x: Tensor) -> Tensor:
        """Outputs."""
        x, kept = self.first(x), []
        self.passes += 1
        for block in self.blocks:
            x = block(x)
            kept.append(x)
        for join in self.behind:
            x = join(torch.cat([x, kept.pop(self.takes)], -1))
        return x


class Identity(nn.Module):
    """A block that adds nothing."""

    def forward(self, x: Tensor) -> Tensor:
        """The same."""
        return x


@pytest.mark.parametrize("takes", [-1, 0])
@pytest.mark.parametrize("most", [32, 3])
@pytest.mark.parametrize("depth", [2, 7])
def test_each_point_of_a_list_is_tried_by_itself(
    depth: int, takes: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one block more some points give a later block another skip, and some do not."""
    monkeypatch.setattr("theodolite.surgery.insertion_points.MOST_PASSES", most)
    torch.manual_seed(0)
    model, inputs = LongSkips(depth, takes).eval(), torch.randn(5, 4)
    before, same = model(inputs), []
    for at in range(depth + 1):
        model.blocks.insert(at, Identity())
        if torch.equal(model(inputs), before):
            same.append(f"blocks.{at}")
        model.blocks.pop(at)
    assert 0 < len(same) <= depth
    points = find_points(model, inputs)
    assert [point.name for point in points.found] == same
    assert set(points.left.values()) == {CHANGED}
    assert len(points.left) == depth + 1 - len(same)
    _, proof = insert_block(model, inputs, same[-1], points=points)
    assert proof.outputs == 0
    assert torch.equal(model(inputs), before)


def test_a_deep_network_is_not_run_once_for_each_point() -> None:
    model = nn.Sequential(nn.Linear(4, 8), *(Branch(8) for _ in range(80)))
    passes: list[None] = []
    model[0].register_forward_hook(lambda *args: passes.append(None))
    points = find_points(model, torch.randn(5, 4))
    assert len(points.found) == 81
    assert len(passes) < 40


class Outside(nn.Module):
    """The sums are outside of the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)) for _ in "12")

    def forward(self, x: Tensor) -> Tensor:
        """Outputs."""
        for block in self.blocks:
            x = x + block(x)
        return x


@pytest.mark.parametrize(
    ("model", "inputs", "reason"),
    [
        (Outside(), torch.randn(3, 4), "the sum is outside of it"),
        (GPT(32, 2, head_dim=16, residual="routed"), TOKENS, "not called with a stream"),
        (
            nn.TransformerEncoder(
                nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2, enable_nested_tensor=False
            ),
            torch.randn(2, 3, 8),
            "norm_first=True",
        ),
    ],
    ids=["outside", "routed", "torch"],
)
def test_why_there_is_no_point_is_said(model: nn.Module, inputs: Tensor, reason: str) -> None:
    points = find_points(model, inputs)
    assert not points.found
    assert reason in points.left[next(iter(points.left))]
    with pytest.raises(SurgeryError, match=reason):
        insert_block(model, inputs, 1)


class Stage(nn.Module):
    """A branch with a small stream of its own, between two projections."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(width, width), nn.Linear(width, width)
        self.blocks = nn.Sequential(*(Branch(width) for _ in range(2)))

    def forward(self, x: Tensor) -> Tensor:
        """The stream after it."""
        return x + self.leave(self.blocks(self.enter(x)))


@pytest.mark.parametrize("at", ["stages.1", "stages.0.blocks.1", "stages.1.blocks.2"])
def test_blocks_can_be_inserted_into_the_stream_and_into_small_streams_inside_of_branches(at: str) -> None:
    model = nn.Sequential()
    model.add_module("enter", nn.Linear(4, 8))
    model.add_module("stages", nn.Sequential(Stage(8), Stage(8)))
    x = torch.randn(5, 4)
    lists = {point.rpartition(".")[0] for point in (each.name for each in find_points(model, x).found)}
    assert lists == {"stages", "stages.0.blocks", "stages.1.blocks"}
    before, modules = model(x), len(list(model.modules()))
    grown, _ = insert_block(model, x, at)
    torch.testing.assert_close(grown(x), before, rtol=0, atol=0)
    assert len(list(grown.modules())) > modules


def test_where_stages_are_taken_by_number_blocks_are_inserted_inside_of_them() -> None:
    """One block more in a list of stages would take the place of another stage."""
    model, x = MultilevelNet(4, 1, levels=3), torch.randn(2, 1, 8, 8)
    names = [point.name for point in find_points(model, x).found]
    assert names == [f"blocks.{level}.{place}" for level in range(3) for place in range(2)]
    before = model(x)
    grown, _ = insert_block(model, x, "blocks.1.1")
    torch.testing.assert_close(grown(x), before, rtol=0, atol=0)
    assert len(grown.blocks[1]) == 2
