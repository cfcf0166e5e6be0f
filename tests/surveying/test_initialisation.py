import pytest
from torch import nn

from theodolite.surveying import Site
from theodolite.surveying.sections.initialisation import Ends, depth_counted, examine, measure


def only(site):
    (finding,) = examine(site)
    return finding


@pytest.mark.parametrize("power", [-1.0, -0.5, 0.0, 0.5])
def test_the_slope_of_a_power_law_is_its_power(power):
    depths = (2, 4, 8, 16)
    assert Ends("w", depths, tuple(0.3 * depth**power for depth in depths)).slope == pytest.approx(power)


def test_gpt2s_initialisation_counts_depth(gpt):
    workload = gpt(scaled_init=True)
    finding = only(Site(workload, workload.size))
    assert (finding.code, finding.level) == ("TH104", "warn")
    rows = {row["tensor"]: row for row in finding.evidence.rows}
    assert set(rows) == {
        "blocks.*.attention.branch.out.weight",
        "blocks.*.feed_forward.branch.down.weight",
    }
    out = rows["blocks.*.attention.branch.out.weight"]
    # GPT initialises at 1/√fan_in times 1/√(2L).
    assert out["L = 2"] == pytest.approx(64**-0.5 / 4**0.5, rel=0.03)
    assert out["L = 8"] == pytest.approx(64**-0.5 / 16**0.5, rel=0.03)
    assert out["slope"] == pytest.approx(-0.5, abs=0.03)
    assert "(1/√L)" in finding.sentence
    (figure,) = finding.evidence.figures
    assert len(figure.panels) == 2
    assert "slope −0.5" in figure.alt


def test_an_initialisation_without_depth_is_in_order(gpt):
    finding = only(Site(gpt(), gpt().size))
    assert finding.level == "ok"
    assert all(abs(row["slope"]) < 0.05 for row in finding.evidence.rows)


def test_gains_that_end_a_branch_are_looked_at_too(gpt):
    finding = only(Site(gpt(norm_placement="peri"), gpt().size))
    assert finding.level == "ok"
    rows = {row["tensor"]: row for row in finding.evidence.rows}
    assert rows["blocks.*.attention.norm_out.weight"]["L = 2"] == pytest.approx(1.0)


class Stack(nn.Module):
    def __init__(self, width, depth, scale):
        super().__init__()
        self.first, self.last = nn.Linear(8, width, bias=False), nn.Linear(width, 2, bias=False)
        self.up = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(depth))
        self.down = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(depth))
        for layer in self.down:
            nn.init.normal_(layer.weight, std=scale(depth))

    def forward(self, x):
        x = self.first(x)
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(up(x).relu())
        return self.last(x)


@pytest.mark.parametrize(
    "scale, level, words",
    [
        (lambda depth: 0.1 / depth, "warn", "(1/L)"),
        (lambda depth: 0.1 * depth**0.5, "warn", "larger"),
        (lambda depth: 0.0, "ok", "zero at every depth"),
        (lambda depth: 0.1, "ok", "the same size from 2 to 8 blocks"),
    ],
)
def test_other_laws(rows, scale, level, words):
    workload = rows(lambda width, depth: Stack(width, depth, scale))
    finding = only(Site(workload, workload.size))
    assert finding.level == level
    assert words in finding.sentence


def test_a_width_too_narrow_to_build_is_not_used(rows):
    def build(width, depth):
        if width % 256:
            raise ValueError("256 or nothing")
        return Stack(width, depth, lambda depth: 0.1)

    from theodolite.size import Size

    width, ends, silent = measure(Site(rows(build), Size(512, 2)))
    assert width == 256
    assert [one.pattern for one in ends] == ["down.*.weight"]
    assert silent == []


def test_deep_uses_the_full_width_and_one_more_depth(rows):
    workload = rows(lambda width, depth: Stack(width, depth, lambda depth: 0.1))
    from theodolite.size import Size

    width, (ends,), _ = measure(Site(workload, Size(128, 2), deep=True))
    assert (width, ends.blocks) == (128, (2, 4, 8, 16))
    width, (ends,), _ = measure(Site(workload, Size(128, 2)))
    assert (width, ends.blocks) == (64, (2, 4, 8))


def test_a_finding_without_measurements_has_no_figure():
    finding = depth_counted([], ["a.*.gain"], 64)
    assert finding.evidence.figures == ()
