"""A second pass gives the recorded values, autograd's gradients, and what a network without a part gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import theodolite as th
from theodolite.anatomy.recording.rerun import rerun
from theodolite.anatomy.recording.undisturbed import undisturbed
from theodolite.probes.scaling.activation_layout import find_layout, record_activations

TOKENS = torch.arange(48).reshape(2, 24) % 64


def hooked(model: nn.Module, modules: list[nn.Module], inputs: Any) -> tuple[Tensor, list[Tensor]]:
    """A function of the logits, and its gradients in the outputs of some modules, by hooks."""
    found: dict[int, Tensor] = {}

    def keep(module: nn.Module, arguments: Any, output: Any) -> None:
        found[id(module)] = output[0] if isinstance(output, tuple) else output

    handles = [module.register_forward_hook(keep) for module in modules]
    output = model.eval()(inputs)
    for handle in handles:
        handle.remove()
    value = squared(getattr(output, "logits", output))
    return value.detach(), list(torch.autograd.grad(value, [found[id(module)] for module in modules]))


def squared(logits: Tensor) -> Tensor:
    return (logits * torch.linspace(-1, 1, logits.shape[-1], dtype=logits.dtype)).square().mean()


def same_gradients(model: nn.Module, values: Callable[[Any], Any], modules: list[nn.Module], x: Any) -> None:
    layout = find_layout(model, x)
    chosen = list(values(layout))
    found = rerun(model, x, layout.graph, keep=chosen, gradients=True)
    assert not found.lost
    value = squared(found.output)
    gradients = found.gradients(value)
    expected, by_hooks = hooked(model, modules, x)
    torch.testing.assert_close(value.detach(), expected, rtol=1e-12, atol=0)
    for one, other in zip(chosen, by_hooks, strict=True):
        torch.testing.assert_close(gradients[one].reshape(other.shape), other, rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("placement", ["pre", "post", "peri", "out", "none"])
def test_gradients_are_those_that_hooks_see(placement: str) -> None:
    model = th.models.GPT(64, 2, vocab=64, norm_placement=placement, tied=True).double()
    residuals = [part for block in model.blocks for part in (block.attention, block.feed_forward)]
    same_gradients(model, lambda layout: layout.stream, residuals, TOKENS)
    ends = [residual.norm_out for residual in residuals]
    same_gradients(model, lambda layout: [end for (end,) in layout.branches], ends, TOKENS)


def tiny(name: str, **options: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    common = {"vocab_size": 64, "eos_token_id": 0, "bos_token_id": 0, "pad_token_id": None}
    if name == "GPT2":
        shape = {"n_embd": 32, "n_layer": 2, "n_head": 2}
    else:
        shape |= {"num_key_value_heads": 1, "head_dim": 16}
    config = getattr(transformers, f"{name}Config")(**shape, **common, **options)
    config.use_cache = False
    model = getattr(transformers, "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM")(config)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model.eval()


@pytest.mark.parametrize("name", ["Llama", "Gemma2", "Olmo2", "GPT2"])
def test_of_transformers(name: str) -> None:
    model = tiny(name).double()
    blocks = list(model.transformer.h if name == "GPT2" else model.model.layers)
    same_gradients(model, lambda layout: layout.stream[1::2], blocks, TOKENS)


def test_where_tokens_are_sorted_to_experts() -> None:
    """Autograd copies what a division in place would overwrite: the passes run different operations."""
    model = tiny("Mixtral", num_local_experts=4)
    layout = find_layout(model, TOKENS)
    found = rerun(model, TOKENS, layout.graph, keep=layout.stream, gradients=True)
    gradients = found.gradients(squared(found.output))
    _, by_hooks = hooked(model, list(model.model.layers), TOKENS)
    for one, other in zip(layout.stream[1::2], by_hooks, strict=True):
        torch.testing.assert_close(gradients[one], other, rtol=1e-4, atol=1e-9)
    ends = [end for branch in layout.branches[2:] for end in branch]
    without = rerun(model, TOKENS, layout.graph, zero=ends)
    del model.model.layers[1]
    assert not without.lost
    torch.testing.assert_close(without.output, model(TOKENS).logits)


@pytest.mark.parametrize("placement", ["pre", "peri", "out", "none"])
def test_without_a_block_it_is_the_network_without_that_block(placement: str) -> None:
    model = th.models.GPT(64, 3, vocab=64, norm_placement=placement)
    layout = find_layout(model, TOKENS)
    without = rerun(model, TOKENS, layout.graph, zero=[end for ends in layout.branches[2:4] for end in ends])
    del model.blocks[1]
    assert torch.equal(without.output, record_activations(model, TOKENS).logits)


class Cut(nn.Module):
    """Puts out nothing."""

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        return torch.zeros_like(x)


def test_without_a_branch_a_post_norm_norms_the_stream_again() -> None:
    model = th.models.GPT(64, 2, vocab=64, norm_placement="post")
    layout = find_layout(model, TOKENS)
    without = rerun(model, TOKENS, layout.graph, zero=layout.branches[1])
    model.blocks[0].feed_forward.branch = Cut()
    assert torch.equal(without.output, record_activations(model, TOKENS).logits)


class InPlace(nn.Module):
    """`x += W₂ relu(W₁ x)`, through a view: every value of the stream is overwritten by the next."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.ups = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.downs = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.readout = nn.Linear(8, 3)

    def forward(self, x: Tensor, skipped: int = -1) -> Tensor:
        x = self.embed(x).clone()
        for index, (up, down) in enumerate(zip(self.ups, self.downs, strict=True)):
            branch = down(up(x.clone()).relu_().view(-1, 8))
            if index != skipped:
                x.view(-1).add_(branch.view(-1))
        return self.readout(x)

    def plain(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The same without writing to anything: logits and stream."""
        x, stream = self.embed(x), []
        for up, down in zip(self.ups, self.downs, strict=True):
            x = x + down(up(x).relu())
            stream.append(x)
        return self.readout(x), stream


def test_values_that_are_overwritten_are_taken_in_time() -> None:
    model, x = InPlace().double(), torch.randn(5, 4, dtype=torch.float64)
    layout = find_layout(model, x)
    assert len(layout.stream) == 3
    logits, stream = model.plain(x)
    expected = torch.autograd.grad(squared(logits), stream)
    found = rerun(model, x, layout.graph, keep=layout.stream, gradients=True)
    gradients = found.gradients(squared(found.output))
    for value, one, gradient in zip(layout.stream, stream, expected, strict=True):
        torch.testing.assert_close(found.values[value].reshape(one.shape), one)
        torch.testing.assert_close(gradients[value].reshape(one.shape), gradient)
    for index, ends in enumerate(layout.branches):
        without = rerun(model, x, layout.graph, zero=ends)
        torch.testing.assert_close(without.output, model(x, skipped=index))


def test_a_batch_norm_in_training_uses_the_batch_and_its_buffers_stay() -> None:
    model = th.models.ResNet(8, 1).train()
    x = torch.randn(4, 3, 16, 16) + 3
    layout = find_layout(model, x)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    found = rerun(model, x, layout.graph, keep=layout.stream, gradients=True)
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    torch.testing.assert_close(found.output, model(x), rtol=1e-5, atol=1e-5)
    assert model.training
    running = rerun(model.eval(), x, layout.graph)
    torch.testing.assert_close(running.output, model(x), rtol=1e-5, atol=1e-5)


class Counting(nn.Module):
    """Counts its passes in a buffer that it holds twice."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("passes", torch.zeros(()))
        self.register_buffer("again", self.passes)

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        return x * self.again


def test_a_pass_writes_to_copies_of_buffers() -> None:
    model = Counting()
    buffer = model.passes
    with undisturbed(model):
        assert model(torch.ones(())) == 1
    assert model.passes is model.again is buffer
    assert buffer == 0
