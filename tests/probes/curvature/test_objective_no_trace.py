"""A probe leaves no trace: everything about a model is as before, also when the probe fails half-way."""

from __future__ import annotations

import gc
import random
from functools import cache

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import theodolite as th

from .every import EVERY

every = pytest.mark.parametrize("name", EVERY)


class Busy(nn.Module):
    """Something of everything that a probe could disturb."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.mixed = nn.Linear(4, 12)
        self.norm = nn.BatchNorm1d(4)
        self.other = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.3)
        self.readout = nn.Linear(4, 6)
        self.readout.weight = self.embed.weight
        self.seen = []
        self.left = float("inf")

    def forward(self, tokens):
        self.left -= 1
        if self.left == 0:
            raise ArithmeticError("the third forward pass")
        stream = self.embed(tokens)
        query, key, value = self.mixed(stream)[:, None].chunk(3, -1)
        stream = stream + F.scaled_dot_product_attention(query, key, value, is_causal=True)[:, 0]
        bent = torch.tanh(self.norm(stream.mT))
        # Memory that a graph of it keeps. A weak reference to the tensor would not do: it may go before.
        self.seen.append(StorageWeakRef(bent.untyped_storage()))
        stream = self.drop(bent + self.other(stream.mT)).mT
        # Drawn from all three generators.
        stream = stream * (
            1 + 0.01 * torch.rand(()).item() + 0.01 * np.random.rand() + 0.01 * random.random()
        )
        return self.readout(stream)


def loss(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def busy():
    """A model in the middle of training, parts of it frozen, with gradients, hooks and moved statistics."""
    torch.manual_seed(1)
    model = Busy().double().train()
    model.other.eval()
    model.mixed.register_forward_hook(lambda module, inputs, output: None)
    model.norm.register_full_backward_hook(lambda module, before, after: None)
    model.readout.weight.register_hook(lambda gradient: None)
    model(torch.randint(6, (3, 5)))
    model.embed.weight.grad = torch.randn(6, 4).double()
    model.mixed.bias.requires_grad_(False)
    random.seed(3), np.random.seed(3), torch.manual_seed(3)
    model.seen.clear()
    return model


def batches(num=1):
    drawn = torch.randint(6, (num, 4, 6), generator=torch.Generator().manual_seed(5))
    pairs = [(one[:, :-1].contiguous(), one[:, 1:].contiguous()) for one in drawn]
    return pairs[0] if num == 1 else pairs


def bits(tensor):
    return None if tensor is None else (tensor.dtype, tuple(tensor.shape), tensor.detach().numpy().tobytes())


def state(model, batch):
    """Everything that has to be the same afterwards, by name."""
    kind, keys, *others = np.random.get_state()
    numpy = (kind, keys.tobytes(), *others)
    found = {"random": (bits(torch.get_rng_state()), random.getstate(), numpy)}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        found[name] = (id(tensor), tensor.data_ptr(), tensor.requires_grad, bits(tensor))
        found[f"{name}.grad"] = (id(tensor.grad), bits(tensor.grad))
        found[f"hooks of {name}"] = list(tensor._backward_hooks or {})
    for name, module in model.named_modules():
        hooks = {key: list(value) for key, value in vars(module).items() if key.endswith("hooks")}
        found[f"module {name}"] = (module.training, hooks, sorted(vars(module)), list(module._parameters))
    found["global hooks"] = [
        len(value) for key, value in sorted(vars(nn.modules.module).items()) if key.startswith("_global_")
        and key.endswith("hooks")
    ]  # fmt: skip
    kernels = torch.backends.cuda
    found["kernels"] = [
        kernels.flash_sdp_enabled(),
        kernels.mem_efficient_sdp_enabled(),
        kernels.math_sdp_enabled(),
    ]
    found["modes"] = [torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_num_threads()]
    found["modes"] += [torch.overrides._get_current_function_mode_stack()]
    pairs = [batch] if isinstance(batch, tuple) else batch
    found["batch"] = [(bits(each), each.requires_grad) for pair in pairs for each in pair]
    return found


def compare(before, after):
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert after[name] == value, f"{name} changed"


class Reading:
    """A probe was asked once: what it said, what was there before and after, how much it kept in memory."""

    def __init__(self, name, num):
        model, batch = busy(), batches(num)
        self.before = state(model, batch)
        said = EVERY[name](model, loss, batch)
        self.after = state(model, batch)
        gc.collect()
        self.passes, self.alive = len(model.seen), sum(not one.expired() for one in model.seen)
        self.text = str(said)


reading = cache(Reading)


@every
@pytest.mark.parametrize("num", [1, 2])
def test_everything_is_as_before(name, num):
    assert reading(name, num).passes, "the model was not called at all"
    compare(reading(name, num).before, reading(name, num).after)


@every
def test_everything_is_as_before_when_the_model_fails_half_way(name):
    model, batch = busy(), batches(4)
    model.left = 3
    before = state(model, batch)
    with pytest.raises(ArithmeticError, match="third"):
        EVERY[name](model, loss, batch)
    compare(before, state(model, batch))


@every
@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_everything_is_as_before_when_the_loss_fails_half_way(name, error):
    model, batch, left = busy(), batches(4), [5]

    def failing(logits, targets):
        left[0] -= 1
        if left[0] <= 0:  # and from then on: what fails only on trial logits is no cross-entropy
            raise error
        return loss(logits, targets)

    before = state(model, batch)
    with pytest.raises(error):
        EVERY[name](model, failing, batch)
    compare(before, state(model, batch))


@every
@pytest.mark.parametrize("num", [1, 2])
def test_no_graph_outlives_a_probe(name, num):
    assert reading(name, num).alive == 0, f"{reading(name, num).alive} activations are still in memory"


@every
def test_no_graph_is_left_when_a_probe_fails(name):
    model, batch = busy(), batches(4)
    model.left = 3
    with pytest.raises(ArithmeticError):
        EVERY[name](model, loss, batch)
    gc.collect()
    assert all(one.expired() for one in model.seen)


@every
def test_readings_repeat_and_do_not_depend_on_the_state_of_generators(name):
    model, batch = busy(), batches()
    torch.manual_seed(99), np.random.seed(99), random.seed(99)
    assert str(EVERY[name](model, loss, batch)) == reading(name, 1).text


@every
def test_probes_work_where_gradients_are_switched_off(name):
    model, batch = busy(), batches()
    with torch.no_grad():
        assert str(EVERY[name](model, loss, batch)) == reading(name, 1).text
        assert not torch.is_grad_enabled()


def test_a_shuffling_loader_gives_the_same_batches_in_every_pass_and_its_generator_stays() -> None:
    torch.manual_seed(0)
    inputs, targets = torch.randn(60, 4), torch.arange(60) % 3
    generator = torch.Generator().manual_seed(3)
    examples = torch.utils.data.TensorDataset(inputs, targets)
    loader = torch.utils.data.DataLoader(
        examples, batch_size=8, shuffle=True, drop_last=True, generator=generator
    )
    before = generator.get_state()
    operator = th.probes.hessian(nn.Linear(4, 3), nn.functional.cross_entropy, loader)
    vector = torch.randn(15)
    assert torch.equal(operator @ vector, operator @ vector)
    assert torch.equal(generator.get_state(), before)
