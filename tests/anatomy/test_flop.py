"""FLOP against closed forms and against torch's own counter, which runs the forward and the backward pass."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from theodolite import Size, UseError
from theodolite.anatomy.flop import FlopCount, flop
from theodolite.models import GPT, ResidualMLP, ResNet


def counted_by_torch(model, inputs):
    """Forward, and forward with backward."""
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        output = model(inputs)
        forward = counter.get_total_flops()
        (output if isinstance(output, torch.Tensor) else output.logits).sum().backward()
        return forward, counter.get_total_flops()


class Convolutions(nn.Module):
    """Strided, dilated, transposed and one-dimensional convolutions."""

    def __init__(self):
        super().__init__()
        self.strided = nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.dilated = nn.Conv2d(16, 8, 3, dilation=2)
        self.up = nn.ConvTranspose2d(8, 6, 4, stride=2)
        self.line = nn.Conv1d(6, 5, 3)

    def forward(self, x):
        return self.line(self.up(self.dilated(self.strided(x))).flatten(2))


class Adapted(nn.Module):
    """A frozen layer with a low-rank adapter, and a branch whose gradient is cut off."""

    def __init__(self):
        super().__init__()
        self.before = nn.Linear(12, 12)
        self.frozen = nn.Linear(12, 12).requires_grad_(False)
        self.down, self.up = nn.Linear(12, 3, bias=False), nn.Linear(3, 12, bias=False)
        self.side = nn.Linear(12, 12)

    def forward(self, x):
        x = self.before(x)
        return self.frozen(x) + self.up(self.down(x)) + self.side(x.detach())


TOKENS = torch.randint(256, (2, 32), generator=torch.Generator().manual_seed(0))
NETWORKS = {
    "GPT": (lambda: GPT(64, 2), TOKENS),
    "GPT, tied, gated, grouped queries": (lambda: GPT(64, 2, tied=True, gated=True, kv_heads=1), TOKENS),
    "GPT, biases": (lambda: GPT(64, 2, bias=True, norm="layer", positions="learned"), TOKENS),
    "GPT, experts": (lambda: GPT(64, 2, experts=4), TOKENS),
    "MLP": (lambda: ResidualMLP(64, 3, inputs=20, outputs=10), torch.ones(7, 20)),
    "ResNet": (lambda: ResNet(8, 1), torch.ones(2, 3, 16, 16)),
    "convolutions": (Convolutions, torch.ones(2, 8, 20, 20)),
    "adapter": (Adapted, torch.ones(5, 12)),
    "encoder of torch": (
        lambda: nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True),
        torch.ones(2, 9, 32),
    ),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_the_count_is_torchs(name):
    build, inputs = NETWORKS[name]
    model = build()
    found = flop(model, inputs)
    assert (found.forward, found.training) == counted_by_torch(model, inputs)
    assert found.parameters == sum(each.numel() for each in model.parameters())


def test_a_grouped_convolution_takes_each_weight_once_for_each_place():
    model = nn.Sequential(
        nn.Conv2d(8, 8, 1), nn.Conv2d(8, 16, 3, groups=4), nn.ConvTranspose2d(16, 6, 4, 2, groups=2)
    )
    found = flop(model, torch.ones(3, 8, 20, 20))
    first, grouped, up = (weight.numel() for weight in (layer.weight for layer in model))
    products = [3 * 20 * 20 * first, 3 * 18 * 18 * grouped, 3 * 18 * 18 * up]
    assert found.forward == 2 * sum(products)
    assert found.training == 3 * found.forward - 2 * products[0]  # torch's counter takes groups for one


def test_a_gpt_takes_6n_and_its_attention_for_each_token():
    width, depth, length = 128, 3, 32
    found = flop(GPT(width, depth), TOKENS)
    not_embedding = 12 * depth * width**2 + 256 * width  # blocks and readout
    per_token = 6 * not_embedding + 12 * depth * width * length
    assert found.training == per_token * TOKENS.numel()
    assert found.forward * 3 == found.training


def test_a_residual_mlp_takes_6n_without_the_gradient_of_its_inputs():
    width, depth, examples = 64, 3, 7
    model = ResidualMLP(width, depth, inputs=20, outputs=10)
    weights = sum(each.numel() for each in model.parameters() if each.ndim == 2)
    found = flop(model, torch.ones(examples, 20))
    assert found.forward == 2 * weights * examples
    assert found.training == (6 * weights - 2 * 20 * width) * examples


def test_a_build_function_is_counted_as_the_network_it_builds():
    built = flop(lambda width, depth: GPT(width, depth), TOKENS, size=Size(64, 2, tokens=1000))
    assert built == flop(GPT(64, 2), TOKENS)


def test_thirty_billion_parameters_take_no_memory():
    width, depth = 8192, 40
    found = flop(GPT, TOKENS[:1], size=Size(width, depth))
    not_embedding = 12 * depth * width**2 + 256 * width
    assert not_embedding > 3e10
    assert found.training == (6 * not_embedding + 12 * depth * width * 32) * 32


def test_a_network_whose_control_flow_depends_on_values_is_built_for_real():
    class Choosing(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

        def forward(self, x):
            return self.layers[int(x.sum() > 0)](x)

    found = flop(lambda width, depth: Choosing(width), torch.ones(3, 16), size=Size(16, 1))
    assert found.forward == 2 * 3 * 16 * 16


def test_a_llama_of_transformers_is_counted():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=256,
    )
    model = transformers.LlamaForCausalLM(config)
    found = flop(model, TOKENS)
    block = 64 * (64 + 2 * 32 + 64) + 3 * 64 * 160
    assert found.training == (6 * (2 * block + 256 * 64) + 12 * 2 * 64 * 32) * TOKENS.numel()
    assert (found.forward, found.training) == counted_by_torch(model, TOKENS)


def test_a_ready_module_is_left_as_it_was():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(), nn.Flatten(), nn.LazyLinear(2))
    model(torch.ones(2, 3, 8, 8))
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    flop(model, torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(1)))
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.training
    assert all(each.grad is None for each in model.parameters())


def test_it_is_saved_and_loaded(tmp_path):
    found = flop(nn.Linear(8, 4), torch.ones(10, 8))
    assert FlopCount.load(found.save(tmp_path / "flop.json")) == found


@pytest.mark.parametrize(
    "ask, words",
    [
        (lambda: flop(GPT, TOKENS), r"size is None.*Give size=Size"),
        (lambda: flop(nn.Linear(8, 4), torch.ones(10, 7)), "the forward pass of Linear failed"),
        (lambda: flop(GPT, (TOKENS, TOKENS, TOKENS), size=Size(64, 1)), "the forward pass of GPT failed"),
    ],
)
def test_what_cannot_be_counted_is_named(ask, words):
    with pytest.raises(UseError, match=words):
        ask()
