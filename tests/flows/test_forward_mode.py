"""Derivatives in forward mode have the right values and the right gradients through common layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from theodolite import UseError
from theodolite.flows.forward_mode import derivative

aten = torch.ops.aten


class Tokens(nn.Module):
    """A layer on the 8 features as 2 tokens or channels of 4."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, h: Tensor) -> Tensor:
        return self.layer(h.view(-1, 2, 4)).reshape(-1, 8)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, h: Tensor) -> Tensor:
        return self.inner(h, h, h, need_weights=False)[0]


class Call(nn.Module):
    def __init__(self, function: object) -> None:
        super().__init__()
        self.function = function

    def forward(self, h: Tensor) -> Tensor:
        return self.function(h)  # type: ignore[operator]


class Checkpointed(nn.Module):
    """A layer whose activations are made twice."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, h: Tensor) -> Tensor:
        return checkpoint(self.layer, h, use_reentrant=False)


def in_flash_attention(layer: nn.Module) -> nn.Module:
    """A layer that chooses a kernel without forward mode for its attention."""

    def run(h: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return layer(h)

    module = Call(run)
    module.layer = layer
    return module


def attention(**options: Any) -> nn.Module:
    """Attention of the 8 features as 2 tokens in 2 heads of 2 channels, or of 2 heads with 1 head of keys."""

    def mix(h: Tensor) -> Tensor:
        q = h.view(-1, 2, 2, 2).transpose(1, 2)
        k = q[:, :1] if "enable_gqa" in options else q
        return F.scaled_dot_product_attention(q, k.sin(), k, **options).transpose(1, 2).reshape(-1, 8)

    return Call(mix)


def fused_attention(h: Tensor, view: Any = aten.view.default) -> Tensor:
    """A view, as in an exported network, of the layout (B, T, H, D), which only the fused kernels give."""
    q = h.view(-1, 2, 2, 2).transpose(1, 2)
    mixed = aten.scaled_dot_product_attention.default(q, q.sin(), q)
    return view(mixed.transpose(1, 2), [len(h), 8])


def in_eval_mode(norm: Any) -> nn.Module:
    mean, var = torch.linspace(-1, 1, 8).double(), torch.linspace(0.5, 2, 8).double()
    return Call(lambda h: norm(h, None, None, mean, var, False, 0.1, 1e-5)[0])


def exported(layer: nn.Module) -> nn.Module:
    rows = ({0: torch.export.Dim("rows", min=2, max=64)},)
    return torch.export.export(layer, (torch.randn(4, 8),), dynamic_shapes=rows).module()


LAYERS = {
    "layer norm": nn.LayerNorm(8),
    "layer norm without weights": nn.LayerNorm(8, elementwise_affine=False),
    "torch.layer_norm": Call(lambda h: torch.layer_norm(h, [8])),
    "torch.native_layer_norm": Call(lambda h: torch.native_layer_norm(h, [8], None, None, 1e-5)[0]),
    "torch.batch_norm": Call(lambda h: torch.batch_norm(h, None, None, None, None, True, 0.1, 1e-5, False)),
    "torch.instance_norm": Tokens(
        Call(lambda h: torch.instance_norm(h, None, None, None, None, True, 0.1, 1e-5, False))
    ),
    "rms norm": nn.RMSNorm(8, eps=1e-6),
    "group norm": nn.GroupNorm(2, 8),
    "batch norm": nn.BatchNorm1d(8, track_running_stats=False),
    "batch norm in eval mode": nn.BatchNorm1d(8).eval(),
    "instance norm": Tokens(nn.InstanceNorm1d(2, affine=True)),
    "glu": Call(lambda h: F.glu(torch.cat([h, h.flip(1)], 1))),
    "attention": Tokens(Attention()),
    "transformer": Tokens(nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)),
    "weight norm": nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
    "convolution": Tokens(nn.Conv1d(2, 2, 3, padding=1)),
    "torch.layer_norm by name": Call(lambda h: torch.layer_norm(input=h, normalized_shape=[8])),
    "aten.layer_norm": Call(lambda h: aten.layer_norm(h, [8])),
    "aten.layer_norm.default": Call(lambda h: aten.layer_norm.default(h, [8], eps=0.1)),
    "aten.native_layer_norm": Call(lambda h: aten.native_layer_norm(h, [8], None, None, 1e-5)[0]),
    "aten.batch_norm": Call(lambda h: aten.batch_norm(h, None, None, None, None, True, 0.1, 1e-5, False)),
    "aten.instance_norm": Tokens(
        Call(lambda h: aten.instance_norm(h, None, None, None, None, True, 0.1, 1e-5, False))
    ),
    "aten.group_norm": Call(lambda h: aten.group_norm(h, 2)),
    "aten.native_group_norm": Call(
        lambda h: aten.native_group_norm(h[..., None], None, None, len(h), 8, 1, 2, 1e-5)[0][..., 0]
    ),
    "aten.rms_norm": Call(lambda h: aten.rms_norm(h, [8], None, 1e-6)),
    "aten._fused_rms_norm": Call(lambda h: aten._fused_rms_norm(h, [8], None, 1e-6)[0]),
    "aten.glu": Call(lambda h: aten.glu(torch.cat([h, h.flip(1)], 1))),
    "exported layer norm": exported(nn.LayerNorm(8)),
    "exported batch norm": exported(nn.BatchNorm1d(8, track_running_stats=False)),
    "exported batch norm in eval mode": exported(nn.BatchNorm1d(8).eval()),
    "exported instance norm": exported(Tokens(nn.InstanceNorm1d(2, affine=True))),
    "exported attention": exported(Tokens(Attention())),
    "checkpoint": Checkpointed(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Tanh())),
    "flash attention": in_flash_attention(attention()),
    "flash attention, causal": in_flash_attention(attention(is_causal=True, scale=0.3)),
    "flash attention, masked": in_flash_attention(
        attention(attn_mask=torch.tensor([[1.0, -2], [0, 3]]).double())
    ),
    "flash attention, grouped": in_flash_attention(attention(enable_gqa=True)),
    "flash attention in a module": in_flash_attention(Tokens(Attention())),
    "aten.view.default of fused attention": Call(fused_attention),
    "view of fused attention": Call(lambda h: fused_attention(h, Tensor.view)),
    "aten.view.default by name": Call(
        lambda h: aten.view.default(h, size=[2 * len(h), 4]).cumsum(1).reshape(-1, 8)
    ),
    "exported aten.view.dtype": exported(  # negative numbers are negative integers
        Call(lambda h: h * (torch.linspace(-1, 1, 8, dtype=torch.float64).view(torch.int64) < 0))
    ),
    "torch.native_batch_norm in eval mode": in_eval_mode(torch.native_batch_norm),
    "torch.native_batch_norm in eval mode by name": in_eval_mode(
        lambda h, w, b, mean, var, training, *rest: torch.native_batch_norm(
            h, w, b, mean, var, training=training, momentum=0.1, eps=1e-5
        )
    ),
    "aten.native_batch_norm in eval mode": in_eval_mode(aten.native_batch_norm.default),
    "aten._native_batch_norm_legit in eval mode": in_eval_mode(aten._native_batch_norm_legit),
    "aten._native_batch_norm_legit_functional in eval mode": in_eval_mode(
        aten._native_batch_norm_legit_functional
    ),
    "torch._batch_norm_impl_index in eval mode": in_eval_mode(
        lambda *args: torch._batch_norm_impl_index(*args, True)
    ),
}


class Net(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.first, self.layer, self.last = nn.Linear(3, 8), layer, nn.Linear(8, 2)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        hidden = self.layer(torch.tanh(self.first(torch.cat([x, t[:, None]], 1))))
        return self.last(torch.sin(hidden))


@pytest.mark.parametrize("layer", LAYERS)
def test_the_gradient_of_a_derivative_is_that_of_finite_differences(layer: str) -> None:
    net = Net(LAYERS[layer]).double()
    generator = torch.Generator().manual_seed(0)
    for parameter in net.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    x = torch.randn(5, 2, generator=generator, dtype=torch.float64)
    t, step = torch.linspace(0.1, 0.8, 5, dtype=torch.float64), 1e-5
    value, slope = derivative(lambda t: net(x, t), (t,), (torch.ones_like(t),))
    expected = (net(x, t + step) - net(x, t - step)) / (2 * step)
    assert torch.equal(value, net(x, t)) or torch.allclose(value, net(x, t), rtol=1e-12)
    assert torch.allclose(slope, expected, rtol=1e-6, atol=1e-6)
    found, wanted = (
        torch.autograd.grad(one.square().sum() + (one * net(x, t)).sum(), list(net.parameters()))
        for one in (slope, expected)
    )
    for one, other in zip(found, wanted, strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-6 * float(other.abs().max() + 1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_plain_layer_norms_round_like_torch(dtype: torch.dtype) -> None:
    layer, x = nn.LayerNorm(64).to(dtype), torch.randn(8, 64).to(dtype)
    value, _ = derivative(layer, (x,), (x,))
    assert value.dtype == layer(x).dtype
    assert torch.allclose(value, layer(x), atol=0.02 if dtype == torch.bfloat16 else 1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        assert derivative(layer, (x,), (x,))[0].dtype == layer(x).dtype


def test_a_product_with_a_batch_of_networks_is_that_of_each() -> None:
    """Inside vmap and grad, as a fleet of networks is trained."""
    net = Net(nn.Sequential(nn.LayerNorm(8), Tokens(Attention()))).double()
    x, t = torch.randn(4, 2, dtype=torch.float64), torch.rand(4, dtype=torch.float64)
    weights = {name: torch.stack([one.data, 1.1 * one.data]) for name, one in net.named_parameters()}

    def loss(chosen: dict[str, Tensor]) -> Tensor:
        def run(t: Tensor) -> Tensor:
            return torch.func.functional_call(net, chosen, (x, t))

        return derivative(run, (t,), (torch.ones_like(t),))[1].square().sum()

    together = torch.func.vmap(torch.func.grad(loss))(weights)
    for model in range(2):
        alone = {name: one[model].clone().requires_grad_() for name, one in weights.items()}
        gradients = torch.autograd.grad(loss(alone), list(alone.values()), materialize_grads=True)
        for name, gradient in zip(alone, gradients, strict=True):
            assert torch.allclose(together[name][model], gradient, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "norm",
    [
        lambda h: torch.native_batch_norm(h, None, None, None, None, True, 0.1, 1e-5)[0],
        lambda h: aten.native_batch_norm(h, None, None, None, None, True, 0.1, 1e-5)[0],
        lambda h: aten._native_batch_norm_legit.no_stats(h, None, None, True, 0.1, 1e-5)[0],
        lambda h: torch._batch_norm_impl_index(h, None, None, None, None, True, 0.1, 1e-5, False)[0],
        lambda h: torch.native_batch_norm(h, None, None, None, None, training=True, momentum=0.1, eps=1e-5)[
            0
        ],
        lambda h: aten._batch_norm_with_update_functional(h, None, None, h[0], h[1], 0.1, 1e-5)[0],
    ],
)
def test_batch_norms_whose_gradient_would_be_wrong_are_refused(norm: Any) -> None:
    x = torch.randn(5, 8, dtype=torch.float64)
    with pytest.raises(
        UseError,
        match=r"calls torch.*batch_norm.* in train mode, whose derivative has wrong gradients in tor",
    ):
        derivative(norm, (x,), (x,))
