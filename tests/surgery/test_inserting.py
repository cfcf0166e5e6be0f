"""A block that is inserted changes nothing, learns at once, and leaves no trace where it is refused."""

from __future__ import annotations

import copy
import io
from contextlib import redirect_stderr
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import theodolite as th
from theodolite.models import GPT
from theodolite.surgery import SurgeryError, find_points, insert_block, rebuild

from .networks import (
    HF,
    NETWORKS,
    SIZES,
    TOKENS,
    Branch,
    Stack,
    exactly,
    gradients,
    hugging_face,
    logits,
    moved,
    network,
)

IMAGES = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("at", [0, 1])
def test_outputs_and_gradients_are_those_without_the_block(name: str, at: int) -> None:
    plain = network(name)
    with exactly(name):
        before, slopes = gradients(plain)
        grown, proof = insert_block(copy.deepcopy(plain), TOKENS, at)
        after, found = gradients(grown)
    assert torch.equal(after, before)
    assert proof.outputs == 0
    assert proof.gradients == 0
    assert proof.dtype == "float64"
    (block,) = proof.moved
    holder, _, number = block.rpartition(".")
    for old, slope in slopes.items():
        head, _, rest = old.removeprefix(f"{holder}.").partition(".")
        behind = old.startswith(f"{holder}.") and int(head) >= at
        assert torch.equal(found[f"{holder}.{int(head) + 1}.{rest}" if behind else old], slope), old
    assert int(number) == at
    alive = [each for each in found if each.startswith(f"{block}.") and found[each].abs().max() > 0]
    assert alive, "nothing of the block has a gradient: it could never learn"


@pytest.mark.parametrize("name", ["gpt", "gpt layer", "gpt peri", "gpt post", "gpt out", "Olmo2"])
def test_halves_are_kept_to_the_bit(name: str) -> None:
    plain = network(name, torch.bfloat16)
    with exactly(name):
        before = logits(plain)
        grown, proof = insert_block(plain, TOKENS, 1)
        assert torch.equal(logits(grown), before)
    assert (proof.outputs, proof.dtype) == (0.0, "bfloat16")


def test_a_zero_gain_is_alive_where_a_zero_projection_would_explode() -> None:
    # Peri-norm: a projection of zeros puts the norm at its singular point.
    model = GPT(32, 1, vocab=64, head_dim=16, norm_placement="peri").double()
    points = find_points(model, TOKENS)
    assert {closer.name for closer in points.found[0].outputs} == {
        "attention.norm_out.weight",
        "feed_forward.norm_out.weight",
    }
    insert_block(model, TOKENS, 1)
    logits(model).square().mean().backward()
    sound = float(model.blocks[1].feed_forward.norm_out.weight.grad.norm())
    other = GPT(32, 2, vocab=64, head_dim=16, norm_placement="peri").double()
    nn.init.zeros_(other.blocks[1].feed_forward.branch.down.weight)
    logits(other).square().mean().backward()
    wild = float(other.blocks[1].feed_forward.branch.down.weight.grad.norm())
    assert 0 < sound < wild / 20


def test_a_post_norm_copy_goes_without_the_norm_of_the_sum() -> None:
    model = network("gpt post")
    insert_block(model, TOKENS, 1)
    new, old = model.blocks[1], model.blocks[0]  # type: ignore[index]
    assert isinstance(new.attention.norm_stream, nn.Identity)
    assert isinstance(old.attention.norm_stream, nn.RMSNorm)


@pytest.mark.parametrize("name", HF)
def test_hugging_face_models_are_saved_and_read_again(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = SIZES | {"num_hidden_layers": 2} | HF[name] | ({"n_layer": 2} if name == "GPT2" else {})
    model = moved(hugging_face(name, **sizes))
    with redirect_stderr(io.StringIO()):
        written = model.generate(TOKENS[:1], max_new_tokens=3, do_sample=False)
        before = logits(model)
        insert_block(model, TOKENS, 2)
        insert_block(model, TOKENS, 0)
        assert model.config.num_hidden_layers == 4
        assert torch.equal(model.generate(TOKENS[:1], max_new_tokens=3, do_sample=False), written)
        model.save_pretrained(tmp_path)
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
        if name == "Mixtral":
            again.config._experts_implementation = "eager"
        assert again.config.num_hidden_layers == 4
        assert torch.equal(logits(again), before)


def test_layers_know_their_new_numbers_and_kinds() -> None:
    model = hugging_face("Gemma2", **SIZES | {"num_hidden_layers": 2})
    assert model.config.layer_types == ["sliding_attention", "full_attention"]
    insert_block(model, TOKENS, 1)
    assert [layer.self_attn.layer_idx for layer in model.model.layers] == [0, 1, 2]
    assert model.config.layer_types == ["sliding_attention", "sliding_attention", "full_attention"]
    assert model.model.layers[1].self_attn.config is model.config


def test_an_optimizer_goes_on_and_trains_the_block() -> None:
    model = GPT(32, 2, vocab=64, head_dim=16)
    matrices = [each for each in model.parameters() if each.dim() > 1]
    vectors = [each for each in model.parameters() if each.dim() < 2]
    optimizer = torch.optim.AdamW([{"params": matrices, "lr": 0.01}, {"params": vectors, "lr": 0.02}])
    logits(model).square().mean().backward()
    optimizer.step()
    remembered = {id(each): held["exp_avg"].clone() for each, held in optimizer.state.items()}
    insert_block(model, TOKENS, 1, optimizer=optimizer)
    for each, held in optimizer.state.items():
        assert torch.equal(held["exp_avg"], remembered[id(each)])
    groups = {id(one): group["lr"] for group in optimizer.param_groups for one in group["params"]}
    assert len(groups) == len(list(model.parameters()))
    assert groups[id(model.blocks[1].feed_forward.branch.down.weight)] == 0.01
    assert groups[id(model.blocks[1].feed_forward.norm_in.weight)] == 0.02
    logits(model).square().mean().backward()
    optimizer.step()
    assert model.blocks[1].feed_forward.branch.down.weight.abs().max() > 0


def test_a_block_of_ones_own_is_closed() -> None:
    model = Stack(8, 2)
    inputs = torch.randn(5, 4)
    before = model(inputs)
    own = nn.Sequential(Branch(8))  # another structure than its neighbours
    insert_block(model, inputs, 1, block=own)
    assert model.blocks[1] is own
    assert torch.equal(model(inputs), before)
    assert own[0].down.weight.abs().max() == 0
    assert own[0].up.weight.abs().max() > 0


class Silent(nn.Module):
    """A branch with zeros before what ends it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        """The stream after it."""
        return x + self.down(torch.tanh(self.up(x)))


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (Silent(), "could never learn"),
        (nn.Linear(8, 8), "x \\+ f\\(x\\)"),
    ],
)
def test_a_block_that_cannot_be_is_refused_and_taken_out(block: nn.Module, message: str) -> None:
    model = Stack(8, 2)
    kept = {name: tensor.clone() for name, tensor in block.state_dict().items()}
    inputs = torch.randn(5, 4)
    before = model(inputs)
    names = list(model.state_dict())
    with pytest.raises(SurgeryError, match=message):
        insert_block(model, inputs, 1, block=block)
    assert list(model.state_dict()) == names
    assert torch.equal(model(inputs), before)
    for name, tensor in block.state_dict().items():
        assert torch.equal(tensor, kept[name])


def test_fresh_blocks_come_from_the_network_that_is_given() -> None:
    model, fresh = Stack(8, 2), Stack(8, 2)
    insert_block(model, torch.randn(5, 4), 1, fresh=fresh)
    assert torch.equal(model.blocks[1].up.weight, fresh.blocks[0].up.weight)


def test_a_rebuilt_network_makes_up_for_its_multipliers() -> None:
    inputs = torch.randn(6, 4).double()
    model = Stack(8, 3, divided=True).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(inputs).square().sum().backward()
    optimizer.step()
    before = model(inputs)
    insert_block(model, inputs, 1, optimizer=optimizer)
    target = Stack(8, 4, divided=True).double()
    into = torch.optim.AdamW(target.parameters(), lr=0.01)
    _, proof = rebuild(model, target, inputs, optimizer=optimizer, into=into)
    assert (target(inputs) - before).abs().max() < 1e-14
    assert proof.outputs is not None
    assert proof.outputs < 1e-12
    old, new = model.blocks[0].down.weight, target.blocks[0].down.weight
    assert torch.allclose(new, old * 4 / 3)  # 1/3 has become 1/4
    assert torch.allclose(into.state[new]["exp_avg"], optimizer.state[old]["exp_avg"] * 3 / 4)
    assert torch.allclose(into.state[new]["exp_avg_sq"], optimizer.state[old]["exp_avg_sq"] * 9 / 16)
    assert torch.equal(into.state[target.first.weight]["step"], optimizer.state[model.first.weight]["step"])


def test_a_rebuilt_network_takes_the_plan_of_its_depth() -> None:
    inputs = torch.randn(6, 4)
    base = th.Size(8, 2)
    small = th.plan(Stack, inputs, size=base, base=base, lr=0.01)
    deep = th.plan(Stack, inputs, size=th.Size(8, 3), base=base, lr=0.01)
    model = small.build()
    optimizer = small.optimizer(model)
    model(inputs).square().sum().backward()
    optimizer.step()
    before = model(inputs)
    insert_block(model, inputs, 2, optimizer=optimizer)
    target = deep.build()
    into = deep.optimizer(target)
    rebuild(model, target, inputs, optimizer=optimizer, into=into)
    assert torch.allclose(target(inputs), before, atol=1e-6)
    rates = {name: group["lr"] for group in into.param_groups for name in group["param_names"]}
    assert rates["blocks.2.down.weight"] == pytest.approx(deep["blocks.2.down.weight"].lr)
    target(inputs).square().sum().backward()
    into.step()


def test_a_target_of_other_tensors_is_refused_and_kept() -> None:
    grown, _ = insert_block(network("gpt post"), TOKENS, 1)
    target = GPT(32, 2, vocab=64, head_dim=16, norm_placement="post").double()
    kept = copy.deepcopy(target.state_dict())
    with pytest.raises(SurgeryError, match=r"norm_stream\.weight is in the target"):
        rebuild(grown, target, TOKENS)
    assert all(torch.equal(tensor, kept[name]) for name, tensor in target.state_dict().items())


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        (th.models.ResidualMLP(16, 2, inputs=8, block_layers=1), torch.randn(3, 8)),
        (th.models.ResNet4(16, 2, inputs=8, variant="all"), torch.randn(3, 8)),
    ],
    ids=["ResidualMLP", "ResNet4"],
)
def test_built_in_networks_grow(model: nn.Module, inputs: Tensor) -> None:
    before = model(inputs)
    _, proof = insert_block(model, inputs, 1)
    assert proof.outputs == 0
    assert torch.equal(model(inputs), before)


class Mixed(Branch):
    """A norm in float32 in a network of halves, and a batch norm that is frozen."""

    def __init__(self) -> None:
        super().__init__(8)
        self.frozen = nn.BatchNorm1d(8).eval()
        self.to(torch.bfloat16)
        self.norm.float()
        self.register_buffer("angles", torch.linspace(0, 1, 8))

    def forward(self, x: Tensor) -> Tensor:
        """The stream after it."""
        normed = self.norm(x.float() * self.angles).bfloat16()
        return x + self.down(torch.tanh(self.up(self.frozen(normed))))


def test_a_copy_keeps_dtypes_and_modes_and_learns_where_the_network_is_frozen() -> None:
    model = nn.Sequential(nn.Linear(4, 8).bfloat16(), Mixed(), Mixed(), nn.Linear(8, 2).bfloat16()).train()
    for block in (model[1], model[2]):
        block.frozen.eval()
        block.requires_grad_(False)
    inputs = torch.randn(5, 4).bfloat16()
    optimizer = torch.optim.AdamW([model[0].weight, model[3].weight, model[0].bias], lr=0.01)
    insert_block(model, inputs, 2, optimizer=optimizer)
    new, old = model[2], model[1]
    assert {name: tensor.dtype for name, tensor in new.state_dict().items()} == {
        name: tensor.dtype for name, tensor in old.state_dict().items()
    }
    assert not new.frozen.training
    assert new.training
    model(inputs)  # it can be called as it is
    trained = {id(one) for group in optimizer.param_groups for one in group["params"]}
    assert all(tensor.requires_grad and id(tensor) in trained for tensor in new.parameters())
    assert not any(tensor.requires_grad for tensor in old.parameters())


def test_an_optimizer_of_another_network_is_refused() -> None:
    other = torch.optim.SGD(Stack(8, 2).parameters(), lr=0.1)
    with pytest.raises(SurgeryError, match="trains no tensor of this model"):
        insert_block(Stack(8, 2), torch.randn(5, 4), 1, optimizer=other)


def test_a_refused_block_leaves_numbers_and_config_as_they_were() -> None:
    model = hugging_face("Gemma2", **SIZES | {"num_hidden_layers": 2})
    config, names = copy.deepcopy(model.config.to_dict()), list(model.state_dict())
    with pytest.raises(SurgeryError):
        insert_block(model, TOKENS, 1, block=nn.Linear(32, 32).double().eval())
    assert model.config.to_dict() == config
    assert list(model.state_dict()) == names
    assert [layer.self_attn.layer_idx for layer in model.model.layers] == [0, 1]
