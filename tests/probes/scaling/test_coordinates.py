"""The coordinate check finds right and wrong parameterizations; slopes are those of known powers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import theodolite as th
from theodolite import Size
from theodolite.planning import plan
from theodolite.planning.parameterization import with_zero_readout
from theodolite.probes import Coordinates, coordinates
from theodolite.probes.scaling.coordinates import Slope, fit_slopes, worst_first
from theodolite.probes.scaling.first_steps import Track, follow
from theodolite_studies.framework.networks import NETWORKS, network

pytestmark = pytest.mark.usefixtures("one_dissection")

# One and a half octaves of depth and of width, in seconds, after the first step that moves more than the
# readout, which starts at zero. The promise of ±0.1 is for the whole range and the mean of three seeds, which
# `theodolite study coordinates` runs. Here small depths are still a little away from where large ones are; a
# wrong rule is off by a half or one.
SIZES = (th.Size(64, 3), th.Size(192, 3), th.Size(64, 9))
TOLERANCE = 0.3
ATTENTION = 0.4  # of two heads, with one seed

workload_of = cache(partial(network, num=4, length=32))


@cache
def checked(name: str, optimizer: str, parameterization: str) -> Coordinates:
    if name.startswith("hf"):
        pytest.importorskip("transformers")
    vector_lr = 2**-11 if name.startswith("hf") else 2**-9
    return coordinates(
        workload_of(name),
        SIZES,
        base=th.Size(64, 1),
        **({"lr": vector_lr} if optimizer == "adamw" else {"lr": 4 * vector_lr, "vector_lr": vector_lr}),
        optimizer=optimizer,
        parameterization=parameterization,
        steps=2,
        seeds=(0,),
    )


def off(made: Coordinates) -> dict[tuple[str, str], float]:
    return {
        (slope.quantity, slope.axis): round(slope.excess, 3)
        for slope in made.bent(TOLERANCE)
        if not ("branch.0" in slope.quantity and slope.within(ATTENTION))
    }


MATRICES = ("gpt-pre", "hf-gpt2")
"""Networks that are tried with Muon too; `theodolite study coordinates` tries all."""


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [*((name, "adamw") for name in NETWORKS), *((name, "muon-kimi") for name in MATRICES)],
)
def test_with_the_plan_every_value_keeps_its_size(name: str, optimizer: str) -> None:
    assert off(checked(name, optimizer, "plan")) == {}


@pytest.mark.parametrize("name, optimizer", [("gpt-pre", "muon-kimi"), ("hf-gpt2", "adamw")])
def test_with_the_standard_parameterization_they_do_not(name: str, optimizer: str) -> None:
    wrong = off(checked(name, optimizer, "standard"))
    for quantity in ("change of stream", "change of branch.1", "change of logits"):
        assert wrong[quantity, "width"] > TOLERANCE
    assert wrong["branch.1", "depth"] > 0.5
    assert wrong["change of branch.1", "depth"] > 0.5


def test_the_worst_comes_first_and_says_how_wrong_it_is_at_ten_times() -> None:
    assert checked("gpt-post", "adamw", "plan").flat(ATTENTION)
    slopes = checked("gpt-pre", "muon-kimi", "standard").bent()
    assert [abs(slope.excess) for slope in slopes] == sorted((abs(s.excess) for s in slopes), reverse=True)
    assert f"×{10 ** slopes[0].excess:.2g} at 10×" in str(slopes[0])


class Line(nn.Module):
    """`x → x + b·a·x → readout`, with nothing random but the readout, which starts at zero."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.embed = nn.Linear(1, width, bias=False)
        self.first = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(depth))
        self.second = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(depth))
        self.readout = nn.Linear(width, 2, bias=False)
        nn.init.ones_(self.embed.weight)
        for layer in (*self.first, *self.second):
            nn.init.constant_(layer.weight, 1 / width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for first, second in zip(self.first, self.second, strict=True):
            x = x + second(first(x).relu())
        return self.readout(x)


def line_batch(seed: int, step: int) -> tuple[Tensor, Tensor]:
    return torch.tensor([[1.0], [3.0]]), torch.tensor([0, 1])


LINE = th.Workload("line", Line, line_batch, nn.functional.cross_entropy, th.Size(4, 2))


class Joint(nn.Module):
    """A block of two streams that read each other."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.across, self.inside, self.other = (
            nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)) for _ in range(3)
        )
        self.norm = nn.LayerNorm(width, elementwise_affine=False)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        mixed = self.norm(x) + self.norm(y)
        x, y = x + self.across(mixed), y + self.other(mixed)
        return x + self.inside(self.norm(x)), y


class TwoStreams(nn.Module):
    """In its last block nothing reads what is added to the second stream."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, width), nn.Linear(8, width)
        self.blocks = nn.ModuleList(Joint(width) for _ in range(depth))
        self.norm, self.last = nn.LayerNorm(width, elementwise_affine=False), nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        x, y = self.first(x), self.second(x)
        for block in self.blocks:
            x, y = block(x, y)
        return self.last(self.norm(x))


def test_each_stream_is_compared_with_its_own_number_of_branches() -> None:
    def batch(seed: int, step: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(32, 8, generator=torch.Generator().manual_seed(1000 * seed + step))
        return x, (x[:, 0] > 0).long()

    workload = th.Workload("two streams", TwoStreams, batch, nn.functional.cross_entropy, th.Size(64, 2))
    sizes = [th.Size(64, depth) for depth in (2, 4, 8)]
    made = coordinates(workload, sizes, base=th.Size(64, 2), lr=2**-9, steps=2, seeds=2)
    four = next(track for track in made.tracks if track.size.depth == 4)
    share, other = 1 / 8, 1 / 3
    assert four.expected == {
        **{f"{change}branch.{kind}": share for kind in (0, 1) for change in ("", "change of ")},
        **{f"{change}branch.0 of stream 1": other for change in ("", "change of ")},
    }
    # Least squares through log₂ of 1, 3 and 7 branches at 2, 4 and 8 blocks.
    slopes = {slope.quantity: slope for slope in made.slopes}
    assert slopes["branch.0 of stream 1"].expected == pytest.approx(-math.log2(7) / 2)
    assert slopes["branch.0"].expected == -1
    assert {slope.quantity: round(slope.excess, 2) for slope in made.bent(TOLERANCE)} == {}


def test_values_of_a_network_that_can_be_done_by_hand() -> None:
    """With all weights alike every block doubles its input, from inputs of root mean square √5."""
    size = th.Size(4, 3)
    made = with_zero_readout(plan(LINE.build, line_batch(0, 0)[0], size=size, base=size, lr=0.01))
    assert [name for name, row in made.rows.items() if not row.init.size] == ["readout.weight"]
    track = follow(LINE, made, seed=0, steps=2)
    start = math.sqrt(5)
    assert track.stream[0] == pytest.approx([2 * start, 4 * start, 8 * start])
    assert track.branches[0] == pytest.approx([start, 2 * start, 4 * start])
    assert track.values["stream"][0] == pytest.approx(8 * start)
    assert track.values["branch.0"][0] == pytest.approx(math.sqrt((1 + 4 + 16) / 3) * start)
    assert track.expected == {"branch.0": 1 / 3, "change of branch.0": 1 / 3}
    # Step 1 moves the readout by lr in every entry and, as it was zero, nothing else: logits ±4·8x·lr.
    assert track.values["logits"][:2] == pytest.approx([0, 4 * 8 * start * 0.01], rel=1e-4)
    assert track.values["change of logits"][1] == pytest.approx(4 * 8 * start * 0.01, rel=1e-4)
    assert track.values["change of stream"][:2] == pytest.approx((0, 0), abs=1e-6)
    # Step 2 moves everything else too, and as all weights stay alike, only by a factor.
    assert track.values["change of stream"][2] > 0.01
    assert track.values["change of stream"][2] == pytest.approx(
        abs(track.stream[2][-1] - 8 * start), rel=1e-4
    )


def test_a_run_that_diverges_is_a_result() -> None:
    made = coordinates(
        th.workload("mlp-mixture"),
        [th.Size(16, 1), th.Size(32, 1)],
        base=th.Size(16, 1),
        lr=1e30,
        optimizer="sgd",
        seeds=(0,),
        steps=4,
    )
    assert {track.status for track in made.tracks} == {"diverged"}
    assert all(len(values) == 5 for track in made.tracks for values in track.values.values())
    assert not made.flat(1e9)
    assert "diverged" in str(made)


def test_nothing_random_is_spent_and_a_seed_says_all() -> None:
    mlp, sizes = th.workload("mlp-mixture"), [th.Size(16, 1), th.Size(32, 1)]
    check = partial(coordinates, mlp, sizes, base=sizes[0], lr=0.01, steps=2)
    before = torch.get_rng_state()
    first = check(seeds=(3,))
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(7)
    assert first.tracks == check(seeds=(3,)).tracks


def test_the_seed_is_that_of_the_weights_and_of_the_batches() -> None:
    mlp, sizes = th.workload("mlp-mixture"), [th.Size(16, 1), th.Size(32, 1)]
    same_batches = dataclasses.replace(mlp, batch=lambda seed, step: mlp.batch(0, step))
    made = coordinates(same_batches, sizes, base=sizes[0], lr=0.01, steps=1, seeds=(3, 4))
    assert made.tracks[0].stream[0] != made.tracks[1].stream[0]
    asked: list[tuple[int, int]] = []
    noted = dataclasses.replace(
        mlp, batch=lambda seed, step: asked.append((seed, step)) or mlp.batch(seed, step)
    )
    coordinates(noted, sizes[:1] * 2 + sizes[1:], base=sizes[0], lr=0.01, steps=2, seeds=(5,))
    assert set(asked) == {(5, 0), (5, 1), (5, 10_000)}


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"sizes": [th.Size(16, 1), th.Size(32, 2)]},
            r"sizes are 16 × 1, 32 × 2: give at least two of equal",
        ),
        ({"sizes": [(16, 1)]}, r"sizes holds \(16, 1\): give Sizes"),
        ({"seeds": ()}, "seeds is \\(\\): give at least one seed"),
        ({"steps": 0}, "steps is 0"),
        ({"parameterization": "mup"}, "parameterization is 'mup'. It is one of plan, standard"),
    ],
)
def test_bad_input_is_named(changes: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"sizes": [th.Size(16, 1), th.Size(32, 1)], **changes}
    sizes = given.pop("sizes")
    with pytest.raises(th.UseError, match=message):
        coordinates(th.workload("mlp-mixture"), sizes, base=th.Size(16, 1), lr=0.01, **given)


def test_the_readout_is_known_by_its_role_where_depth_moves_its_name() -> None:
    """In a plain list the readout's name at base size is a hidden layer's at another depth."""

    class Residual(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(self.up(x).relu())

    def build(width: int, depth: int) -> nn.Module:
        return nn.Sequential(
            nn.Linear(8, width), *(Residual(width) for _ in range(depth)), nn.Linear(width, 2)
        )

    made = plan(build, torch.zeros(1, 8), size=th.Size(32, 4), base=th.Size(16, 2), lr=0.01)
    silent = with_zero_readout(made)
    assert [name for name in made.rows if silent[name].init != made[name].init] == ["5.weight"]


def test_a_loss_that_has_no_gradient_at_zero_logits_trains_from_the_planned_readout() -> None:
    """It ignores the length of its logits, as that of `poisson` does: from zero, nothing would ever move."""

    def angle(logits: Tensor, targets: Tensor) -> Tensor:
        lengths = logits.square().sum(1) * targets.square().sum(1)
        return (1 - (logits * targets).sum(1).square() / lengths.clamp_min(1e-30)).mean()

    def build(width: int, depth: int) -> nn.Module:
        return th.models.ResidualMLP(width, depth, inputs=8, outputs=4)

    def batch(seed: int, step: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1_000_003 * seed + step)
        return torch.randn(16, 8, generator=generator), torch.randn(16, 4, generator=generator)

    sizes = [th.Size(16, 2), th.Size(64, 2)]
    task = th.Workload("angle", build, batch, angle, sizes[0])
    found = coordinates(task, sizes, base=sizes[0], lr=2**-6, steps=3, seeds=1)
    for track in found.tracks:
        assert track.values["logits"][0] > 0.01
        assert min(track.values["change of stream"][1:]) > 0
    made = with_zero_readout(plan(build, batch(0, 0)[0], size=sizes[0], base=sizes[0], lr=0.1))
    zero = follow(task, made, seed=0, steps=2)
    assert set(zero.values["change of logits"]) == {0.0}


class Cosine(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, nn.functional.normalize(self.weight, dim=1))


def weight_normed(width: int) -> nn.Module:
    return nn.utils.parametrizations.weight_norm(nn.Linear(width, 2))


def spectrally_normed(width: int) -> nn.Module:
    return nn.utils.parametrizations.spectral_norm(nn.Linear(width, 2))


@pytest.mark.parametrize(
    "head", [weight_normed, spectrally_normed, lambda width: Cosine(width, 2, bias=False)]
)
def test_a_readout_that_is_divided_by_its_norm_is_not_set_to_zero(head: Callable[[int], nn.Module]) -> None:
    def build(width: int, depth: int) -> nn.Module:
        return nn.Sequential(nn.Linear(8, width), nn.ReLU(), head(width))

    def batch(seed: int, step: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(8, 8, generator=torch.Generator().manual_seed(step))
        return x, (x.sum(1) > 0).long()

    workload = th.Workload("normed", build, batch, nn.functional.cross_entropy, th.Size(16, 1))
    size = workload.size
    made = with_zero_readout(plan(build, batch(0, 0)[0], size=size, base=size, lr=0.01))
    track = follow(workload, made, seed=0, steps=2)
    assert track.status == "finished"
    assert track.values["change of logits"][-1] > 0


def test_layers_outside_of_branches_are_looked_at_by_hand() -> None:
    """Weights of 1 and inputs 1 and 3: 16·x after the second layer of width 4, then zero."""

    def build(width: int, depth: int) -> nn.Module:
        layers = nn.Sequential(
            nn.Linear(1, width, bias=False),
            nn.Linear(width, width, bias=False),
            nn.Linear(width, 2, bias=False),
        )
        for layer in layers:
            nn.init.ones_(layer.weight)
        return layers

    workload = th.Workload("plain", build, line_batch, nn.functional.cross_entropy, th.Size(4, 1))
    made = with_zero_readout(
        plan(build, line_batch(0, 0)[0], size=th.Size(4, 1), base=th.Size(4, 1), lr=0.01)
    )
    values = follow(workload, made, seed=0, steps=2).values
    assert [name for name in values if "layer" in name] == [
        "layer.0.weight",
        "layer.1.weight",
        "change of layer.0.weight",
        "change of layer.1.weight",
    ]
    assert values["layer.0.weight"][0] == pytest.approx(math.sqrt(5))
    assert values["layer.1.weight"][0] == pytest.approx(4 * math.sqrt(5))
    # Step 1 moves the readout alone. In step 2 Adam's means have seen a gradient of zero and one that is not.
    second = 0.01 * (0.1 / (1 - 0.9**2)) / math.sqrt(0.001 / (1 - 0.999**2))
    moved = values["change of layer.0.weight"]
    assert moved == pytest.approx((0, 0, math.sqrt(5) * second), rel=1e-3, abs=1e-6)


def track(width: int, depth: int, value: float, seed: int = 0, expected: float = 0.0) -> Track:
    wanted = {"q": float(depth) ** expected}
    return Track(Size(width, depth), seed, "finished", {"q": (9.0, value)}, wanted, (), ())


def along(slopes: tuple[Slope, ...], axis: str) -> Slope:
    (found,) = (slope for slope in slopes if slope.axis == axis)
    return found


def test_a_power_law_has_its_power() -> None:
    tracks = [track(width, 4, 3 * width**0.5) for width in (64, 128, 512)]
    (slope,) = fit_slopes(tracks)
    assert slope.value == pytest.approx(0.5)
    assert slope.at_ten_times == pytest.approx(10**0.5)
    assert not slope.within(0.1)
    assert fit_slopes(tracks, step=0)[0].value == 0  # all are 9 there


def test_each_line_of_sizes_has_a_level_of_its_own() -> None:
    tracks = [track(w, d, w**0.25 / d) for w in (32, 64, 128) for d in (2, 8)] + [track(4096, 3, 1e9)]
    slopes = fit_slopes(tracks)
    assert along(slopes, "width").value == pytest.approx(0.25)
    assert along(slopes, "depth").value == pytest.approx(-1)


def test_what_should_follow_the_depth_is_judged_by_that() -> None:
    slope = along(fit_slopes([track(64, d, 1 / d, expected=-1.0) for d in (2, 4, 8)]), "depth")
    assert slope.within(0.01)
    assert slope.at_ten_times == pytest.approx(1)


def test_the_interval_is_the_t_interval_over_seeds() -> None:
    powers = (0.1, 0.2, 0.4)
    tracks = [track(w, 2, w**power, seed) for seed, power in enumerate(powers) for w in (32, 64, 256)]
    (slope,) = fit_slopes(tracks)
    mean = sum(powers) / 3
    error = math.sqrt(sum((power - mean) ** 2 for power in powers) / 2 / 3)
    assert slope.value == pytest.approx(mean)
    assert (slope.low, slope.high) == pytest.approx((mean - 4.302653 * error, mean + 4.302653 * error))
    assert math.isnan(fit_slopes(tracks[:3])[0].low)


def test_a_run_that_diverged_is_off_whatever_the_tolerance() -> None:
    (slope,) = fit_slopes([track(32, 2, 1.0), track(64, 2, math.nan)])
    assert not slope.within(1e9)
    assert "diverged" in str(slope)
    assert worst_first([Slope("q", "width", 5.0, 0, 0, 0), slope])[0] is slope


def test_what_stays_zero_is_flat() -> None:
    assert fit_slopes([track(32, 2, 0.0), track(64, 2, 0.0)])[0].value == 0
    assert math.isnan(fit_slopes([track(32, 2, 0.0), track(64, 2, 1.0)])[0].value)


def test_results_print_and_are_read_back(tmp_path: Path) -> None:
    tracks = tuple(track(width, 4, 3 * width**0.5) for width in (64, 128))
    made = Coordinates("plan", "adamw", 0.01, Size(64, 4), 1, tracks)
    assert [line.split() for line in str(made).splitlines()[2:]] == [
        ["quantity", "axis", "slope", "expected"],
        ["─" * 32],
        ["q", "width", "+0.50", "0"],
    ]
    assert Coordinates.load(made.save(tmp_path / "made.json")) == made
    assert Track.load(tracks[0].save(tmp_path / "track.json")) == tracks[0]
    assert "q" in str(tracks[0])
    slope = Slope("q", "depth", 0.5, 0.25, 0.75, expected=1.0)
    assert Slope.load(slope.save(tmp_path / "slope.json")) == slope
    assert (
        made.save(tmp_path / "made.csv").read_text().startswith("quantity,axis,slope,95 % from,to,expected\n")
    )


# The own parameterization

MLP = th.workload("mlp-mixture")
SMALL = Size(32, 2)
WIDTHS = [Size(width, 2) for width in (32, 64, 128)]


def written_down(**options: Any) -> th.Workload:
    """A workload whose author has written the plan down: its weights, and its optimizer."""
    inputs = MLP.draw(0, 0)[0]

    def planned(width: int, depth: int) -> Any:
        return plan(MLP.build, inputs, size=Size(width, depth), base=SMALL, lr=2**-7, **options)

    def build(width: int, depth: int) -> nn.Module:
        return planned(width, depth).build(torch.initial_seed() % 2**31)

    def make(model: nn.Module) -> Any:
        return planned(model.get_parameter("readout.weight").shape[1], 2).optimizer(model)

    return dataclasses.replace(MLP, build=build, optimizer=make)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_own_that_says_what_the_plan_says_gives_its_values(optimizer: str) -> None:
    own = coordinates(written_down(optimizer=optimizer), WIDTHS, parameterization="own", steps=3, seeds=2)
    other = coordinates(MLP, WIDTHS, base=SMALL, lr=2**-7, optimizer=optimizer, steps=3, seeds=2)
    for mine, its in zip(own.tracks, other.tracks, strict=True):
        assert mine.values.keys() == its.values.keys()
        for name, values in mine.values.items():
            assert values == pytest.approx(its.values[name], rel=1e-4)


def plain_adamw(model: nn.Module) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=2**-7, weight_decay=0.0)


def test_own_with_plain_adamw_is_as_wrong_as_standard() -> None:
    own = coordinates(MLP, WIDTHS, base=SMALL, parameterization="own", optimizer=plain_adamw, steps=4)
    assert own.base is None  # it starts from no size
    standard = coordinates(MLP, WIDTHS, base=SMALL, lr=2**-7, parameterization="standard", steps=4)
    assert not own.flat(0.2)
    for mine, its in zip(own.slopes, standard.slopes, strict=True):
        assert abs(mine.value - its.value) < 0.15, mine.quantity  # other random numbers
    assert {slope.quantity for slope in own.bent(0.4)} == {slope.quantity for slope in standard.bent(0.4)}


def test_own_says_which_optimizer_it_is_and_is_saved(tmp_path: Path) -> None:
    workload = dataclasses.replace(MLP, optimizer=plain_adamw)
    made = coordinates(workload, WIDTHS[:2], parameterization="own", steps=1, seeds=1)
    assert str(made).startswith("own, AdamW: slopes after 1 step, 1 seed")
    assert (made.lr, made.base) == (None, None)
    assert Coordinates.load(made.save(tmp_path / "own.json")) == made
    half = coordinates(workload, WIDTHS[:2], parameterization="own", lr=2**-8, steps=1, seeds=1)
    assert str(half).startswith("own, AdamW, lr 0.003906: slopes")
    change = "change of logits"
    one, two = made.tracks[0].values[change][1], half.tracks[0].values[change][1]
    assert one / two == pytest.approx(2, rel=0.02)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"parameterization": "own"}, r"says nothing of its optimizer: give Workload\(…, optimizer="),
        (
            {"parameterization": "own", "optimizer": "muon"},
            "optimizer is 'muon': the own parameterization has",
        ),
        ({"parameterization": "own", "optimizer": plain_adamw, "eps": 1e-6}, "eps is given, and the own"),
        ({"lr": 0.1}, "base is missing: a plan starts from a base size"),
        ({"base": SMALL}, "lr is missing: the plan parameterization needs"),
        ({"parameterization": "standard"}, "lr is missing: the standard parameterization needs"),
    ],
)
def test_arguments_that_are_missing_or_too_many_are_named(options: dict[str, Any], said: str) -> None:
    with pytest.raises(th.UseError, match=said):
        coordinates(MLP, WIDTHS, **options)


def test_a_factory_that_changes_between_calls_is_no_parameterization() -> None:
    rates = iter([0.01 / 2**k for k in range(9)])

    def decaying(model: nn.Module) -> Any:
        return torch.optim.AdamW(model.parameters(), lr=next(rates))

    with pytest.raises(th.UseError, match=r"keeps state between calls: .* with lr 0.01, then 0.005"):
        coordinates(MLP, WIDTHS, parameterization="own", optimizer=decaying)
