"""Growing a network: the jump, the choice of a place, what is certified, what leaves everything as it was."""

from __future__ import annotations

import copy
import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import theodolite as th
from theodolite.cli import main
from theodolite.commands.grow import _loaded
from theodolite.growing import Splits, jump, longest_step, save_file, split
from theodolite.growing.checkpoints import SavedNetwork, load_file, load_folder, save
from theodolite.planning.readout_multiplier import attach_multipliers
from theodolite.probes import signal
from theodolite.probes.example_losses import losses_of
from theodolite.surgery import insert_block

WIDTH = 8


class Block(nn.Module):
    """`x + V tanh(W x)`."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The stream after it."""
        return x + self.down(torch.tanh(self.up(x)))


class Stack(nn.Module):
    """Blocks on a stream that is the input, read by a map."""

    def __init__(self, width: int = WIDTH, depth: int = 1) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.last = nn.Linear(WIDTH, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def taught(examples: int, *, depth: int = 3, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Inputs, and the class that a deeper network sees in them."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        teacher = Stack(depth=depth)
        for block in teacher.blocks:
            block.down.weight.data.mul_(4)
        torch.manual_seed(seed)
        inputs = torch.randn(examples, WIDTH)
        return inputs, (4 * teacher(inputs)).argmax(-1).detach()


def trained(steps: int = 8) -> Stack:
    """A network of one block that has learned something, and has much to gain."""
    torch.manual_seed(1)
    model = Stack()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    inputs, targets = taught(512, seed=3)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    return model


@pytest.fixture(scope="module")
def student() -> Stack:
    return trained()


def batches(examples: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    inputs, targets = taught(examples, seed=seed)
    return [(inputs[at : at + 256], targets[at : at + 256]) for at in range(0, examples, 256)]


class LongSkips(nn.Module):
    """A U: what the blocks return is added again later, the last of it first."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.behind = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(depth))
        self.last = nn.Linear(WIDTH, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        kept = []
        for block in self.blocks:
            x = block(x)
            kept.append(x)
        for join in self.behind:
            x = join(torch.cat([x, kept.pop()], -1))
        return self.last(x)


def test_a_network_with_long_skips_grows_where_they_stay_in_their_places() -> None:
    """One block more at the end would shift the skips; one before the first two blocks would not."""
    torch.manual_seed(0)
    model = LongSkips(3)
    grown = th.grow(model, F.cross_entropy, split(batches(4096, 11)))
    assert [point.name for point in grown.steps[0].signal.points] == ["blocks.0", "blocks.1"]
    assert len(model.blocks) == 4
    assert grown.certificate is not None


@cache
def grown_student(blocks: int, along: Any = "preconditioned") -> tuple[Stack, th.Grown]:
    """The student as it grows on the examples that most tests take, for those that only look at it."""
    model = trained()
    return model, th.grow(model, F.cross_entropy, split(batches(4096, 11)), blocks=blocks, along=along)


@pytest.mark.parametrize("along", ["gradient", "preconditioned"])
def test_a_network_with_much_to_gain_grows_and_its_certificate_is_true(student: Stack, along: Any) -> None:
    model, grown = grown_student(2, along)
    assert len(grown.new_blocks) == 2
    assert len(model.blocks) == 3
    assert all(stage.proof is not None and stage.proof.outputs == 0 for stage in grown.steps)
    assert grown.certificate is not None
    assert grown.certificate.holds
    fresh = batches(20_000, 12)
    fall = losses_of(student, F.cross_entropy, fresh) - losses_of(model, F.cross_entropy, fresh)
    bound = grown.certificate.bound
    assert float(fall.clamp(-bound, bound).mean()) > grown.certificate.lower > 0
    assert grown.certificate.candidates == 3  # each block, and both together
    said = " ".join(str(grown).split())
    assert "certified" in said
    assert "It does not say" in said
    assert [stage.chosen.jump.gain > 0 for stage in grown.steps if stage.chosen] == [True, True]


def test_a_network_with_nothing_to_learn_is_left_as_it_was() -> None:
    torch.manual_seed(0)
    model = Stack()
    inputs = torch.randn(1024, WIDTH)
    with torch.no_grad():  # targets with noise around its own outputs: the mean gradient is zero
        targets = model(inputs) + torch.randn(1024, 3)
    kept = copy.deepcopy(model.state_dict())
    grown = th.grow(model, F.mse_loss, split((inputs, targets)))
    assert grown.new_blocks == ()
    assert grown.certificate is None
    assert grown.steps[0].signal.deepest
    assert "more depth does not help" in grown.steps[0].why
    assert list(model.state_dict()) == list(kept)
    assert all(torch.equal(tensor, kept[name]) for name, tensor in model.state_dict().items())


def test_a_network_whose_readout_is_zero_says_nothing_about_depth() -> None:
    torch.manual_seed(0)
    model = Stack()
    nn.init.zeros_(model.last.weight)
    grown = th.grow(model, F.mse_loss, split((torch.randn(256, WIDTH), torch.randn(256, 3))))
    assert grown.new_blocks == ()
    assert "no gradient reaches any point" in grown.steps[0].why


def test_few_examples_decide_nothing() -> None:
    """24 of the 48 examples to estimate judge the gain, and 30 are needed."""
    torch.manual_seed(0)
    data = torch.randn(96, WIDTH), torch.full((96, 3), 3.0)
    grown = th.grow(Stack(), F.mse_loss, split(data), method="betting")
    found = grown.steps[0].signal
    assert found.best.significance > found.threshold, "all outputs are too low: the gain is certain"
    assert grown.new_blocks == ()
    assert grown.steps[0].why.startswith("undecided: the gain at blocks.")
    for said in (str(grown), grown.title, str(found)):
        said = " ".join(said.split())
        assert "undecided" in said
        assert "24 held-out examples are too few to know, 30 are needed" in said
        assert "not help" not in said
        assert "no block helps" not in said


def test_a_jump_takes_the_best_step_of_those_tried(student: Stack) -> None:
    model = copy.deepcopy(student)
    data = batches(512, 5)
    found = signal(model, F.cross_entropy, data).best
    insert_block(model, data[0][0], found.point)
    chosen = batches(512, 6)
    cap = longest_step(model, F.cross_entropy, chosen, found.name, found.directions)
    made = jump(model, F.cross_entropy, chosen, found.name, found.directions, slope=found.gain, cap=cap)
    assert 0 < made.length <= made.cap
    assert made.after == min(loss for _, loss in made.tried) < made.before
    down = model.get_parameter(f"{found.name}.down.weight")
    assert torch.allclose(down, -made.step * found.directions["down.weight"].to(down.dtype), atol=1e-6)
    assert float(losses_of(model, F.cross_entropy, batches(512, 6)).mean()) == pytest.approx(made.after)


def test_a_step_that_only_harms_is_not_taken(student: Stack) -> None:
    model = copy.deepcopy(student)
    data = batches(512, 5)
    found = signal(model, F.cross_entropy, data).best
    insert_block(model, data[0][0], found.point)
    upwards = {name: -one for name, one in found.directions.items()}
    made = jump(model, F.cross_entropy, batches(512, 6), found.name, upwards, slope=found.gain)
    assert (made.step, made.gain) == (0.0, 0.0)
    assert model.get_parameter(f"{found.name}.down.weight").abs().max() == 0


def test_a_loss_without_a_radius_still_has_a_jump() -> None:
    torch.manual_seed(0)
    model = Stack()
    inputs = torch.randn(256, WIDTH)
    batch = inputs, inputs[:, :3].sin()
    found = signal(model, F.mse_loss, batch).best
    insert_block(model, inputs, found.point)
    made = jump(model, F.mse_loss, batch, found.name, found.directions, slope=found.gain)
    assert longest_step(model, F.mse_loss, batch, found.name, found.directions) == math.inf
    assert made.gain > 0


@pytest.mark.parametrize("unit", [1e-6, 1e-3, 1e3])
@pytest.mark.parametrize("shift", [0.0, 1.0], ids=["of one sign", "of both signs"])
def test_the_place_and_the_step_do_not_depend_on_the_unit_of_the_loss(unit: float, shift: float) -> None:
    inputs = torch.randn(1024, WIDTH, generator=torch.Generator().manual_seed(2))
    data = inputs, inputs[:, :3].sin()

    def chosen(unit: float) -> Any:
        torch.manual_seed(0)
        loss = lambda logits, targets: unit * (F.mse_loss(logits, targets) - shift)  # noqa: E731
        grown = th.grow(Stack(), loss, split(data))
        assert grown.steps[0].chosen is not None
        return grown.steps[0].chosen

    one, other = chosen(1.0), chosen(unit)
    assert other.point == one.point
    assert other.jump.length == pytest.approx(one.jump.length, rel=1e-3)
    assert other.jump.gain == pytest.approx(unit * one.jump.gain, rel=1e-3)


def test_the_longest_step_reaches_the_minimum_of_a_square() -> None:
    """`(1 − 2ε)²` is 0 at ε = ½; its slope is 4, so halving it to first order would stop at ε = ⅛."""
    model = Stack()
    block = model.blocks[0]
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
        block.up.bias.fill_(20.0)  # its tanh is 1
        model.last.weight[:, 0] = 2 / WIDTH
    direction = torch.zeros(WIDTH, WIDTH)
    direction[0] = -1.0
    batch = torch.zeros(4, WIDTH), torch.ones(4, 3)
    made = jump(model, F.mse_loss, batch, "blocks.0", {"down.weight": direction}, slope=4.0)
    assert made.step == pytest.approx(0.5)
    assert made.after == pytest.approx(0.0, abs=1e-6)


def test_splits_that_overlap_are_refused_before_anything_is_done(student: Stack) -> None:
    model = copy.deepcopy(student)
    data = batches(1024, 9)
    with pytest.raises(th.UseError, match="overlap"):
        th.grow(model, F.cross_entropy, Splits(data[:2], data[2:3], data[2:]))
    assert len(model.blocks) == 1


def test_too_few_examples_are_refused_with_a_number(student: Stack) -> None:
    with pytest.raises(th.UseError, match=r"4 examples to certify on are too few.*at least \d+"):
        th.grow(copy.deepcopy(student), F.cross_entropy, split(batches(16, 9)))


def test_losses_that_are_no_numbers_are_refused(student: Stack) -> None:
    model = copy.deepcopy(student)
    inputs, targets = taught(512, seed=9)
    inputs[500, 0] = math.nan
    with pytest.raises(th.UseError, match="loss of example"):
        th.grow(model, F.cross_entropy, split((inputs, targets)))
    assert len(model.blocks) == 1


def test_what_fails_on_the_way_leaves_the_network_as_it_was(
    student: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = copy.deepcopy(student)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    state, tensors = copy.deepcopy(model.state_dict()), list(model.parameters())

    def late(title: str, share: float) -> None:
        if title.startswith("block 2") and share > 0.9:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        th.grow(
            model, F.cross_entropy, split(batches(2048, 11)), blocks=2, optimizer=optimizer, progress=late
        )
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert [id(one) for one in optimizer.param_groups[0]["params"]] == [id(one) for one in tensors]


def poisoned(batches: Any) -> list[tuple[Tensor, Tensor]]:
    """The same inputs, moved, with other targets."""
    return [(inputs + 1, (targets + 1) % 3) for inputs, targets in batches]


def test_the_certifying_examples_have_no_part_in_what_is_certified(student: Stack) -> None:
    splits = split(batches(4096, 11))
    other = Splits(splits.estimate, splits.choose, poisoned(splits.certify))
    found = [grown_student(2)[1], th.grow(copy.deepcopy(student), F.cross_entropy, other, blocks=2)]
    for one, two in zip(found[0].steps, found[1].steps, strict=True):
        assert one.chosen is not None
        assert two.chosen is not None
        assert one.chosen.point == two.chosen.point
        assert one.chosen.jump == two.chosen.jump
        assert one.certificate is not None
        assert two.certificate is not None
        assert one.certificate.bound == two.certificate.bound
    assert found[0].certificate != found[1].certificate


def test_the_choosing_examples_have_no_part_in_the_signal(student: Stack) -> None:
    splits = split(batches(4096, 11))
    other = Splits(splits.estimate, poisoned(splits.choose), splits.certify)
    found = [grown_student(1)[1], th.grow(copy.deepcopy(student), F.cross_entropy, other)]
    gains = [[one.gain for one in each.steps[0].signal.points] for each in found]
    assert gains[0] == gains[1]


def test_the_network_has_jumped_as_it_was_chosen_to() -> None:
    _, grown = grown_student(1)
    chosen = grown.steps[0].chosen
    assert chosen is not None
    assert grown.after.choose == pytest.approx(chosen.jump.after, rel=1e-6)
    assert grown.before.estimate - grown.after.estimate == pytest.approx(chosen.train_gain, rel=1e-4)
    assert chosen.jump.gain == max(one.jump.gain for one in grown.steps[0].contenders)


def test_fresh_blocks_are_those_of_the_fresh_network(student: Stack) -> None:
    fresh, model = Stack(), copy.deepcopy(student)
    grown = th.grow(model, F.cross_entropy, split(batches(2048, 11)), blocks=2, fresh=fresh)
    new = [block for block in model.blocks if torch.equal(block.up.weight, fresh.blocks[0].up.weight)]
    assert len(new) == len(grown.new_blocks) == 2
    assert len(fresh.blocks) == 1


def test_betting_is_another_bound(student: Stack) -> None:
    found = [
        th.grow(copy.deepcopy(student), F.cross_entropy, split(batches(2048, 11)), method=method).certificate
        for method in ("bernstein", "betting")
    ]
    assert found[0] is not None
    assert found[1] is not None
    assert found[1].lower > found[0].lower
    assert (found[0].method, found[1].method) == ("bernstein", "betting")


def test_points_that_are_asked_for_stay_where_they_were(student: Stack) -> None:
    model = copy.deepcopy(student)
    grown = th.grow(model, F.cross_entropy, split(batches(2048, 11)), blocks=2, at=1)
    assert grown.new_blocks == ("blocks.1", "blocks.2")  # what was point 1 has moved behind the new block
    assert torch.equal(model.blocks[0].up.weight, student.blocks[0].up.weight)


def test_an_interrupted_jump_closes_the_block(student: Stack) -> None:
    model = copy.deepcopy(student)
    data = batches(512, 5)
    found = signal(model, F.cross_entropy, data).best
    insert_block(model, data[0][0], found.point)
    calls = []

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) > 8:
            raise KeyboardInterrupt
        return F.cross_entropy(logits, targets)

    with pytest.raises(KeyboardInterrupt):
        jump(model, loss, batches(512, 6), found.name, found.directions, slope=found.gain)
    assert model.get_parameter(f"{found.name}.down.weight").abs().max() == 0


def test_an_optimizer_trains_the_new_blocks(student: Stack) -> None:
    model = copy.deepcopy(student)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    grown = th.grow(model, F.cross_entropy, split(batches(2048, 11)), optimizer=optimizer)
    known = {id(one) for group in optimizer.param_groups for one in group["params"]}
    assert grown.new_blocks
    assert all(id(one) in known for one in model.parameters())


def ran(*arguments: str) -> int:
    """The exit status of the command."""
    with pytest.raises(SystemExit) as end:
        main(["grow", *arguments])
    return int(end.value.code or 0)


WORKLOAD = """
import torch, torch.nn.functional as F
from test_grow import Stack, taught
import theodolite as th
def build(width, depth): return Stack(width, depth)
def batch(seed, step): return taught(256, seed=100 + seed + step)
workload = th.Workload("taught", build, batch, F.cross_entropy, size=th.Size(8, 1))
"""


@pytest.fixture
def saved(student: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    from safetensors.torch import save_model

    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(WORKLOAD)
    save_model(student, str(tmp_path / "small.safetensors"))
    return tmp_path


def test_the_command_writes_nothing_but_a_page_unless_told(
    saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(each.name for each in saved.iterdir())
    assert ran("small.safetensors", "--workload", "mine.py:workload", "--examples", "4096") == 0
    told = capsys.readouterr()
    assert "certified" in told.out
    assert "--write" in told.err
    made = sorted({each.name for each in saved.iterdir()} - {*before, "__pycache__"})
    assert made == ["grow.html", "grow.json"]
    data = json.loads((saved / "grow.json").read_text())
    assert (data["kind"], data["certified"]) == ("theodolite growth", True)
    (step,) = data["steps"]
    assert step["chosen"]["point"]["name"] in [one["point"]["name"] for one in step["signal"]["points"]]
    page = (saved / "grow.html").read_text()
    assert "small.safetensors (mine.py:workload, 8 × 1): 1 new block (blocks." in page
    assert "Certified fall" in page


def test_what_the_command_writes_is_read_again(saved: Path) -> None:
    said = ["small.safetensors", "--workload", "mine.py:workload", "--examples", "4096"]
    assert ran(*said, "--write", "deep.safetensors") == 0
    found = load_file(saved / "deep.safetensors", "mine.py:workload")
    assert str(found.size) == str(th.Size(8, 2))  # what build(8, 2) makes
    data = json.loads((saved / "grow.json").read_text())
    held = [th.workload("mine.py:workload").draw_held_out(step) for step in range(16)]
    mean = float(losses_of(found.model, F.cross_entropy, held).mean())
    parts = zip(data["after"].values(), data["examples"], strict=True)
    assert mean == pytest.approx(sum(a * b for a, b in parts) / sum(data["examples"]), rel=1e-5)


@pytest.mark.parametrize(
    ("about", "message"),
    [
        ({"workload": "canary.py:workload", "width": 8, "depth": 1}, "canary.py:workload', which is not run"),
        ({"workload": ["canary.py:workload"]}, "give --workload"),
    ],
)
def test_code_that_a_file_names_is_not_run(
    student: Stack, saved: Path, about: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors.torch import save_model

    (saved / "canary.py").write_text("open('has-run', 'w').close()" + WORKLOAD)
    save_model(student, "named.safetensors", {"theodolite": json.dumps(about)})
    assert ran("named.safetensors") == 2
    assert message in capsys.readouterr().err
    assert not (saved / "has-run").exists()


@pytest.mark.parametrize(
    "about",
    [
        '{"width": "8"}',
        '{"depth": -1}',
        '{"inserted": "blocks.1"}',
        '{"inserted": [{}]}',
        "[]",
        "{",
        "[" * 100_000,
        '{"depth": 999999999999}',
    ],
)
def test_odd_facts_in_a_file_are_errors_of_use(
    student: Stack, saved: Path, about: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors.torch import save_model

    save_model(student, "odd.safetensors", {"theodolite": about})
    assert ran("odd.safetensors", "--workload", "mine.py:workload") == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert len(said) < 400


def test_a_certifying_file_that_overlaps_is_refused(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from safetensors.torch import save_file

    inputs, targets = taught(512, seed=1)
    save_file({"inputs": inputs, "targets": targets}, "all.safetensors")
    save_file({"inputs": inputs[:200], "targets": targets[:200]}, "some.safetensors")
    examples = ["--data", "all.safetensors", "--certify", "some.safetensors"]
    assert ran("small.safetensors", "--workload", "mine.py:workload", *examples) == 2
    assert "overlap" in capsys.readouterr().err


def test_a_command_that_certifies_nothing_exits_with_one(saved: Path) -> None:
    assert ran("small.safetensors", "--workload", "mine.py:workload", "--examples", "256") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "is not a checkpoint"),
        (["small.safetensors", "--write", "small.safetensors"], "exists already"),
        (["small.safetensors", "--write", "no/such/deep.safetensors"], "there is no folder"),
        (["small.safetensors"], "--workload"),
        (["small.safetensors", "--workload", "mine.py:workload", "--depth", "2"], "lacks blocks.1"),
        (["small.safetensors", "--workload", "mine.py:workload", "--data", "no.txt"], "does not exist"),
        (["small.safetensors", "--workload", "mine.py:workload", "--data", "mine.py"], "few for bytes"),
    ],
)
def test_what_is_wrong_is_said(
    saved: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ran(*arguments) == 2
    assert message in capsys.readouterr().err


def test_a_resnet_is_written_with_the_blocks_that_no_build_makes(tmp_path: Path) -> None:
    images = torch.rand(2, 3, 8, 8)
    build = th.models.ResNet
    mine = th.Workload(
        "images",
        build,
        lambda seed, step: (images, torch.zeros(2).long()),
        F.cross_entropy,
        size=th.Size(4, 1),
    )
    model = build(4, 1).eval()
    before = model(images)
    insert_block(model, images, 1)
    checkpoint = SavedNetwork(build(4, 1), F.cross_entropy, tmp_path / "a", mine, "mine", th.Size(4, 1))
    said = save(checkpoint, model, images, ["blocks.1"], tmp_path / "b.safetensors")
    assert "which no build makes" in said
    again = load_file(tmp_path / "b.safetensors", mine)
    assert torch.equal(again.model.eval()(images), before)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"_attn_implementation": "some/kernel"}, "code to download, which is not run"),
        (
            {"model_type": "own", "auto_map": {"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"}},
            "custom code",
        ),
        (None, "model.safetensors"),
    ],
)
def test_nothing_in_a_hugging_face_folder_is_run(
    tmp_path: Path, config: dict[str, Any] | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=8, n_embd=4, n_layer=1, n_head=1))
    model.save_pretrained(tmp_path)
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'has-run')!r}, 'w').close()")
    file = tmp_path / "config.json"
    if config is None:  # a pickle in place of the weights
        (tmp_path / "model.safetensors").unlink()
        torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    else:
        file.write_text(json.dumps({**json.loads(file.read_text()), **config}))
    monkeypatch.setattr("builtins.input", lambda *asked: "y")  # transformers would ask, were it allowed to
    with pytest.raises(th.UseError, match=message):
        load_folder(tmp_path)
    assert not (tmp_path / "has-run").exists()


def test_a_hugging_face_model_that_would_be_read_as_another_is_not_written(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=64, n_embd=16, n_layer=2, n_head=2, n_positions=16, scale_attn_by_inverse_layer_idx=True
    )
    torch.manual_seed(0)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "small")
    found = load_folder(tmp_path / "small")
    tokens = torch.randint(64, (2, 8))
    model, _ = insert_block(found.model, tokens, 1)
    with pytest.raises(th.UseError, match="was not written"):
        save(found, model, tokens, ["transformer.h.1"], tmp_path / "deep")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["small"]


def test_a_hugging_face_model_grows_on_a_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers")
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(
        vocab_size=256, num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=16, **sizes
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "small")
    text = th.data.state_of_the_union().tokens[:20_000]
    (tmp_path / "text.txt").write_bytes(bytes(text.tolist()))
    monkeypatch.chdir(tmp_path)
    # An untrained network has far to go: any block that shifts the stream helps.
    assert ran("small", "--data", "text.txt", "--length", "8", "--examples", "500", "--write", "deep") == 0
    assert "certified" in capsys.readouterr().out
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "deep")
    assert again.config.num_hidden_layers == 2


TIED = """
import torch, torch.nn.functional as F
import theodolite as th
def build(width, depth): return th.models.GPT(width, depth, vocab=16, head_dim=8, tied=True)
def batch(seed, step):
    tokens = torch.randint(16, (4, 6), generator=torch.Generator().manual_seed(1000 * seed + step))
    return tokens[:, :-1], tokens[:, 1:]
def loss(logits, targets): return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
workload = th.Workload("tied", build, batch, loss, size=th.Size(16, 1))
"""


@pytest.fixture
def tied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[th.Plan, nn.Module]:
    monkeypatch.chdir(tmp_path)
    Path("tied.py").write_text(TIED)
    workload = th.workload("tied.py:workload")
    inputs, _ = workload.draw(0, 0)
    plan = th.plan(workload.build, inputs, size=th.Size(16, 1), base=th.Size(8, 1), lr=2**-8)
    plan.save("plan.json")
    return plan, plan.build(seed=0)


def test_a_tied_network_is_read_with_the_multiplier_that_it_was_trained_with(
    tied: tuple[th.Plan, nn.Module], capsys: pytest.CaptureFixture[str]
) -> None:
    """Its losses are those it was saved with, whichever way; where nothing is known, that is said."""
    from safetensors.torch import save_model

    plan, model = tied
    workload = th.workload("tied.py:workload")
    held = [workload.draw_held_out(step) for step in range(2)]
    expected = losses_of(model, workload.loss, held)

    def losses(file: str, by: str | None = None) -> Tensor:
        path = None if by is None else Path(by)
        found = _loaded(Path(file), "tied.py:workload", None, None, "cpu", path)
        return losses_of(found.model, workload.loss, held)

    save_model(model, "bare.safetensors")
    with pytest.warns(UserWarning, match=r"embed.weight is readout.weight too: .* had a multiplier"):
        assert not torch.allclose(losses("bare.safetensors"), expected, rtol=0.01)
    assert torch.equal(losses("bare.safetensors", "plan.json"), expected)
    assert "The input of readout is multiplied by 0.5, as in training" in capsys.readouterr().err
    save_file(model, "marked.safetensors", size=th.Size(16, 1))
    assert torch.equal(losses("marked.safetensors"), expected)
    assert torch.equal(losses("marked.safetensors", "plan.json"), expected)
    attach_multipliers(other := copy.deepcopy(model), {"readout": 0.125})
    save_file(other, "other.safetensors")
    with pytest.raises(th.UseError, match=r"trained with the multipliers .*0.125.* the plan has .*0.5"):
        losses("other.safetensors", "plan.json")
    th.surgery.bake(model, plan=plan)
    save_file(model, "baked.safetensors")
    torch.testing.assert_close(losses("baked.safetensors"), expected)
    with pytest.raises(th.UseError, match=r"must end in .safetensors"):
        save_file(model, "weights.pt")


def test_a_grown_tied_network_keeps_its_multiplier(tied: tuple[th.Plan, nn.Module]) -> None:
    _, model = tied
    save_file(model, "small.safetensors")
    found = load_file(Path("small.safetensors"), "tied.py:workload")
    inputs, _ = th.workload("tied.py:workload").draw(0, 0)
    deep, _ = insert_block(found.model, inputs, 1)
    assert "the weights of build(16, 2)" in save(found, deep, inputs, ["blocks.1"], Path("deep.safetensors"))
    again = load_file(Path("deep.safetensors"), "tied.py:workload")
    assert again.multipliers == {"readout": 0.5}
    assert torch.equal(again.model(inputs), deep(inputs))


def test_a_hugging_face_folder_is_read_with_its_multiplier(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_embd=16, n_layer=1, n_head=2, n_positions=16, vocab_size=50, bos_token_id=0, eos_token_id=0
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    attach_multipliers(model, {"lm_head": 0.25})
    model.save_pretrained(tmp_path / "small")
    tokens = torch.arange(8)[None]
    found = load_folder(tmp_path / "small")
    assert found.multipliers == {"lm_head": 0.25}
    assert torch.equal(found.model(tokens).logits, model(tokens).logits)
    deep, _ = insert_block(found.model, tokens, 1)
    save(found, deep, tokens, ["transformer.h.1"], tmp_path / "deep")
    assert torch.equal(load_folder(tmp_path / "deep").model(tokens).logits, model(tokens).logits)
    # Read by transformers alone it is another network, of which there is a warning.
    alone = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "small")
    batches = [(torch.randint(50, (90, 4)), torch.randint(50, (90, 4)))]
    with pytest.warns(UserWarning, match="lm_head multiplied by 0.25, but there is no multiplier"):
        th.grow(alone, lambda logits, y: F.cross_entropy(logits.flatten(0, 1), y.flatten()), split(batches))
