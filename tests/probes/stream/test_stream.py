"""What is said of a stream is what hooks, closed forms and networks without a block say."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import theodolite as th
from theodolite.core.errors import UseError
from theodolite.probes.stream.growth import fit_growth
from theodolite.probes.stream.result import Stream
from theodolite.probes.stream.stream import stream
from theodolite.workloads import next_token_loss

TOKENS = torch.randint(64, (2, 17), generator=torch.Generator().manual_seed(0))
BATCH = TOKENS[:, :-1], TOKENS[:, 1:]


def gpt(depth: int = 2, **options: object) -> nn.Module:
    return th.models.GPT(64, depth, vocab=64, **options).double()


def rms(tensor: Tensor) -> float:
    return tensor.double().square().mean().sqrt().item()


def test_every_number_of_a_row_is_what_hooks_see() -> None:
    model, kept = gpt(), {}
    residuals = [part for block in model.blocks for part in (block.attention, block.feed_forward)]
    for residual in residuals:
        residual.register_forward_hook(lambda module, given, made: kept.update({module: (given[0], made)}))
        residual.branch.register_forward_hook(lambda module, given, made: kept.update({module: made}))
    loss = next_token_loss(model(BATCH[0]), BATCH[1])
    seen = dict(kept)  # hooks see the probe's passes as well
    found = stream(model, next_token_loss, BATCH, skip=False)
    assert found.loss == pytest.approx(loss.item(), rel=1e-12)
    for reach, residual in zip(found.branches, residuals, strict=True):
        (before, after), branch = seen[residual], seen[residual.branch]
        gradients = torch.autograd.grad(loss, [after, branch], retain_graph=True)
        assert reach.stream == pytest.approx(rms(after), rel=1e-9)
        assert reach.added == pytest.approx(rms(branch), rel=1e-9)
        assert reach.share == pytest.approx(rms(branch) / rms(before), rel=1e-9)
        assert reach.cosine == pytest.approx(torch.cosine_similarity(before, after, dim=-1).mean().item())
        assert reach.stream_gradient == pytest.approx(rms(gradients[0]), rel=1e-9)
        assert reach.branch_gradient == pytest.approx(rms(gradients[1]), rel=1e-9)
        assert reach.largest == pytest.approx(after.abs().max().item(), rel=1e-6)
        assert reach.peak == pytest.approx(reach.largest / after.abs().flatten().median().item(), rel=1e-6)
        assert abs(after[reach.peak_at].item()) == pytest.approx(reach.largest, rel=1e-6)
    start = seen[residuals[0]][0]
    assert found.start == pytest.approx(rms(start))
    assert found.start_gradient == pytest.approx(rms(torch.autograd.grad(loss, start)[0]))


def test_skipped_losses_are_those_of_networks_without_the_part() -> None:
    model = gpt(3)
    found = stream(model, next_token_loss, BATCH)
    for index in range(3):
        without = copy.deepcopy(model)
        del without.blocks[index]
        assert found.skipped_blocks[index] == pytest.approx(
            next_token_loss(without(BATCH[0]), BATCH[1]).item() - found.loss, rel=1e-9
        )
        without = copy.deepcopy(model)
        nn.init.zeros_(without.blocks[index].feed_forward.branch.down.weight)
        changed = next_token_loss(without(BATCH[0]), BATCH[1]).item() - found.loss
        assert found.branches[2 * index + 1].skipped == pytest.approx(changed, rel=1e-9)


def mean_growth(kind: str, build: object, batch: tuple[Tensor, Tensor], loss: object) -> tuple[float, ...]:
    """The stream's growth and the gradient's, the mean over three networks, all of which follow the law."""
    seen = []
    for seed in range(3):
        torch.manual_seed(seed)
        found = stream(build(), loss, batch, skip=False)
        assert found.growth.kind == kind, found.growth
        seen.append((found.growth, found.backward))
    return tuple(sum(pair[index].factor for pair in seen) / 3 for index in range(2)), seen[0][0].rise


def test_without_a_norm_a_relu_branch_multiplies_the_square_by_three_halves() -> None:
    """E‖W₂ relu(W₁ h)‖² = ½‖h‖², independent of h; and the same backwards."""
    batch = torch.randn(64, 16), torch.randint(10, (64,))
    (forward, backward), _ = mean_growth(
        "exponential", lambda: th.models.ResidualMLP(256, 8, inputs=16), batch, nn.functional.cross_entropy
    )
    assert forward == pytest.approx(math.sqrt(1.5), abs=0.02)
    assert backward == pytest.approx(math.sqrt(1.5), abs=0.02)


def test_with_norms_at_both_ends_each_branch_adds_one_to_the_square() -> None:
    """A peri-norm branch has RMS 1, as the embedding: RMS² = 1 + 2l."""
    build = lambda: th.models.GPT(64, 8, vocab=64, norm_placement="peri")  # noqa: E731
    _, rise = mean_growth("linear", build, BATCH, next_token_loss)
    assert rise == pytest.approx(2.0, abs=0.4)


@pytest.mark.parametrize(
    "sizes, kind",
    [
        ([1.0, 1.2, 1.1, 1.3, 1.2], "flat"),
        ([4.0, 3.0, 2.0, 1.0, 0.5], "falling"),
        ([1.0, 2.0, 4.0], "unclear"),  # too short to tell
        ([1.0, 1.5, 1.4, 2.1, 1.9], "unclear"),
        ([1.0, math.nan, 2.0, 3.0, 4.0], "unclear"),
        ([0.02, *(block**0.5 for block in range(1, 9))], "linear"),  # an embedding that is small
    ],
)
def test_a_law_is_named_only_where_one_is_better(sizes: list[float], kind: str) -> None:
    assert fit_growth(sizes).kind == kind


def test_headroom_is_of_the_largest_value_anywhere() -> None:
    model, seen = th.models.ResidualMLP(32, 3, inputs=8), []
    with torch.no_grad():  # large inside of the branch, as ever outside
        model.blocks[1].layers[0].weight.mul_(1000)
        model.blocks[1].layers[1].weight.div_(1000)
    batch = torch.randn(16, 8), torch.randint(10, (16,))
    found = stream(model, nn.functional.cross_entropy, batch, skip=False).largest
    model.blocks[1].layers[0].register_forward_hook(lambda module, given, made: seen.append(made))
    model(batch[0])
    assert (found.op, found.where) == ("mm", "block 1, branch 0")
    assert found.value == pytest.approx(seen[0].abs().max().item())
    assert found.headroom == pytest.approx(math.log2(65504 / found.value))


def test_masks_are_no_large_values() -> None:
    assert stream(gpt(), next_token_loss, BATCH, skip=False).largest.value < 100
    transformers = pytest.importorskip("transformers")
    shape = {"n_embd": 64, "n_layer": 1, "n_head": 2, "vocab_size": 64, "bos_token_id": 0, "eos_token_id": 0}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape, attn_implementation="eager"))
    assert stream(model, next_token_loss, BATCH, skip=False).largest.value < 100


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Parameters, buffers, gradients, modes and random numbers are as before."""
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    gradients = {name: tensor.grad for name, tensor in model.named_parameters()}
    kept = {name: None if one is None else one.clone() for name, one in gradients.items()}
    modes = [module.training for module in model.modules()]
    hooks = [len(module._forward_hooks) for module in model.modules()]
    generator = torch.get_rng_state()
    yield
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    for name, tensor in model.named_parameters():
        assert tensor.grad is gradients[name]
        assert tensor.requires_grad
        assert tensor.grad is None or torch.equal(tensor.grad, kept[name])
    assert modes == [module.training for module in model.modules()]
    assert hooks == [len(module._forward_hooks) for module in model.modules()]
    assert torch.equal(generator, torch.get_rng_state())


def test_no_trace_is_left() -> None:
    model = th.models.ResNet(8, 1).train()
    model.blocks[0].eval()
    batch = torch.randn(4, 3, 16, 16), torch.tensor([0, 1, 2, 3])
    nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
    with unchanged(model):
        found = stream(model, nn.functional.cross_entropy, batch)
    assert len(found.skipped_blocks) == 3
    assert None not in found.skipped_blocks


def test_halves_wrapped_and_compiled_models() -> None:
    model = th.models.GPT(64, 2, vocab=64)
    plain = stream(model, next_token_loss, BATCH)
    wrapped = stream(nn.DataParallel(torch.compile(model, backend="eager")), next_token_loss, list(BATCH))
    assert wrapped.skipped_blocks == pytest.approx(plain.skipped_blocks, rel=1e-4)
    for one, other in zip(wrapped.branches, plain.branches, strict=True):
        assert one.peak_at == other.peak_at
        numbers = [{k: v for k, v in vars(reach).items() if isinstance(v, float)} for reach in (one, other)]
        assert numbers[0] == pytest.approx(numbers[1], rel=1e-4)
    half = stream(model.bfloat16(), next_token_loss, BATCH)
    for one, other in zip(half.branches, plain.branches, strict=True):
        assert one.stream == pytest.approx(other.stream, rel=0.02)
        assert one.stream_gradient == pytest.approx(other.stream_gradient, rel=0.05)
        assert one.skipped == pytest.approx(other.skipped, abs=0.02)


def test_a_massive_entry_is_found_where_it_is() -> None:
    model = gpt()
    with torch.no_grad():
        model.embed.weight[TOKENS[1, 3], 5] = 5000.0
    found = stream(model, next_token_loss, BATCH, skip=False)
    assert len(found.massive) == 4
    example, token, channel = found.massive[0].peak_at
    assert TOKENS[example, token] == TOKENS[1, 3]
    assert channel == 5
    assert "massive   block 0, branch 0: 5000 at" in str(found)


def test_what_it_cannot_look_at_is_said() -> None:
    with pytest.raises(UseError, match="Sequential has no residual branches"):
        stream(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), nn.functional.cross_entropy, (
            torch.ones(2, 4), torch.tensor([0, 1])))  # fmt: skip
    with pytest.raises(UseError, match="not one number"):
        stream(gpt(), lambda logits, targets: logits.mean(0), BATCH)
    with pytest.raises(UseError, match="give a pair"):
        stream(gpt(), next_token_loss, BATCH[0])


class Wary(nn.Module):
    """Does not go on without its branch; hands on no gradient if it is frozen."""

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.first, self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.frozen = frozen

    def forward(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.frozen):
            x = self.first(x)
            after = x + self.down(self.up(x).relu())
            if torch.equal(after, x):
                raise ValueError("the branch is gone")
            return after.sin()


def test_what_could_not_be_measured_is_missing_and_a_note_says_why() -> None:
    batch = torch.randn(3, 4), torch.randn(3, 8)
    found = stream(Wary(frozen=False), nn.functional.mse_loss, batch)
    assert (found.branches[0].skipped, found.skipped_blocks) == (None, (None,))
    assert found.notes == ("without a branch the network failed: ValueError: the branch is gone",)
    frozen = stream(Wary(frozen=True), nn.functional.mse_loss, batch, skip=False)
    assert math.isnan(frozen.branches[0].stream_gradient)
    assert frozen.notes == ("no gradient reaches the stream from the loss",)
    assert frozen.notes[0] in str(frozen)


def test_a_stream_is_read_back(tmp_path: Path) -> None:
    found = stream(gpt(3), next_token_loss, BATCH)
    assert Stream.load(found.save(tmp_path / "found.json")) == found
    assert "Gradient in the stream" in found.save(tmp_path / "found.html").read_text()
    assert found.save(tmp_path / "found.csv").read_text().startswith("block,stream,branch,f/h,")


def test_a_history_follows_training_and_leaves_it_alone(tmp_path: Path) -> None:
    workload = th.workload("mlp-mixture")

    def sgd(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.05)

    history = th.probes.stream_history(workload, sgd, steps=4, every=2, skip=True)
    assert history.steps == (0, 2, 4)
    torch.manual_seed(0)
    model = workload.build(64, 4)
    optimizer = sgd(model)
    for step in range(4):
        optimizer.zero_grad()
        workload.evaluate(model, workload.draw(0, step)).backward()
        optimizer.step()
    last = stream(model, workload.loss, workload.draw(0, 10_000))
    assert history.streams[-1].branches == last.branches
    maps = history.figure(("stream", "skipped")).panels
    assert [row[-1] for row in maps[0].data[0]["z"]] == [math.log10(one.stream) for one in last.branches]
    assert [row[-1] for row in maps[1].data[0]["z"]] == [one.skipped for one in last.branches]
    assert "Loss without the branch" in history.save(tmp_path / "history.html").read_text()
    assert len(history.to_dict()["streams"]) == 3


def test_a_history_under_a_plan_and_one_that_diverges() -> None:
    workload = th.workload("mlp-mixture")
    plan = th.plan(workload.build, workload.draw(0, 0)[0], size=th.Size(64, 4), base=th.Size(64, 2), lr=1e-3)
    assert th.probes.stream_history(workload, plan, steps=1).steps == (0, 1)
    with pytest.raises(UseError, match="leave size out"):
        th.probes.stream_history(workload, plan, size=th.Size(64, 8))
    wild = th.probes.stream_history(
        workload, lambda model: torch.optim.SGD(model.parameters(), lr=1e6), steps=50, every=100
    )
    assert wild.steps[-1] < 50
    assert not math.isfinite(wild.streams[-1].loss)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu() -> None:
    model = th.models.GPT(64, 2, vocab=64)
    plain = stream(model, next_token_loss, BATCH)
    found = stream(model.cuda(), next_token_loss, BATCH)
    for one, other in zip(found.branches, plain.branches, strict=True):
        assert one.stream == pytest.approx(other.stream, rel=1e-3)
        assert one.stream_gradient == pytest.approx(other.stream_gradient, rel=1e-2)
        assert one.skipped == pytest.approx(other.skipped, abs=1e-3)


@pytest.mark.parametrize(
    ("place", "last"), [("blocks.0.attention", "before the first block"), ("blocks.1", "after block 1")]
)
def test_a_gradient_that_is_not_finite_is_noted(place: str, last: str) -> None:
    """√(0·x) is 0, and its derivative 0·inf. What is added after a block is a branch of its own."""
    model = gpt(3)
    model.get_submodule(place).register_forward_hook(lambda module, given, made: made + (0 * made).sqrt())
    found = stream(model, next_token_loss, BATCH)
    assert not found.finite
    (note,) = (note for note in found.notes if note.startswith("not finite"))
    assert note.startswith(f"not finite: the gradient of the stream, last {last}")
    assert "not finite" in str(found)
    assert found.backward.kind == "unclear"
