"""The findings of the stream: alarms where closed forms say so, and none where they do not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from theodolite.models import GPT, ResidualMLP, ResNet
from theodolite.size import Size
from theodolite.surveying import stream_look
from theodolite.surveying.finding import Finding
from theodolite.surveying.sections.stream import examine
from theodolite.surveying.site import Site
from theodolite.workloads import Workload


def findings(workload: Workload, size: Size | None = None) -> dict[str, Finding]:
    return {finding.code: finding for finding in examine(Site(workload, size or workload.size))}


def levels(workload: Workload, size: Size | None = None) -> dict[str, str]:
    return {code: finding.level for code, finding in findings(workload, size).items()}


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are not skipped."""
    monkeypatch.setattr(stream_look, "PATIENCE", 0.0)


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


def test_a_shallow_one_is_worth_a_note(rows: Any) -> None:
    """Each block multiplies RMS² by 3/2."""
    found = findings(rows(lambda width, depth: ResidualMLP(width, depth, inputs=8, outputs=2)), Size(256, 6))
    assert found["TH521"].level == "note"
    assert found["TH521"].evidence.numbers["factor in each block"] == pytest.approx(1.5**0.5, abs=0.06)
    assert found["TH522"].level == "ok"  # 1.5³ is less than 7^1.5


def test_a_new_batch_norm_is_looked_at_as_it_trains() -> None:
    """With the running statistics of a new network the stream would grow exponentially."""

    def batch(seed: int, step: int) -> tuple[Tensor, Tensor]:
        return torch.randn(16, 3, 8, 8, generator=torch.Generator().manual_seed(step)), torch.arange(16) % 10

    workload = Workload("maps", ResNet, batch, nn.functional.cross_entropy, Size(8, 4))
    assert levels(workload)["TH521"] == "ok"


class Blocks(nn.Module):
    """Residual branches `W₂ relu(W₁ x)`, through which the gradient may be cut."""

    def __init__(self, width: int, depth: int, scale: float, cut: bool = False) -> None:
        super().__init__()
        self.cut = cut
        self.first, self.last = nn.Linear(8, width), nn.Linear(width, 2)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width, bias=False))
            for _ in range(depth)
        )
        for block in self.blocks:
            block[2].weight.data *= scale

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            branch = block(x)
            x = x + (branch.detach() if self.cut else branch)
        return self.last(x)


@pytest.mark.parametrize(
    "options, level, title",
    [
        ({"scale": 1.0}, "ok", "What each block is worth"),
        ({"scale": 1e-6}, "note", "Blocks that change nothing yet"),
        ({"scale": 0.0}, "note", "Blocks that start silent"),
        ({"scale": 1.0, "cut": True}, "warn", "Branches that no gradient reaches"),
    ],
)
def test_what_blocks_are_worth(rows: Any, options: dict[str, Any], level: str, title: str) -> None:
    found = findings(rows(lambda width, depth: Blocks(width, depth, **options)))["TH523"]
    assert (found.level, found.title) == (level, title)


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


def test_a_large_network_is_looked_at_in_small(rows: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_look, "MOST_PARAMETERS", 1000)
    build = lambda width, depth: Blocks(width, depth, 1.0)  # noqa: E731
    found = findings(rows(build), Size(256, 3))["TH521"]
    assert found.sentence.startswith("At 64 × 8, a small network of the trials,")
