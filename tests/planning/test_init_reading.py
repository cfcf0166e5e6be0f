"""The initial distribution of every tensor is what the network's source says, to the last digit."""

from __future__ import annotations

import gc
import math
import warnings
import weakref
from collections.abc import Callable
from functools import partial

import pytest
import torch
from scipy import stats
from torch import Tensor, nn

from theodolite import Size, UseError
from theodolite.core.building import build_model
from theodolite.models import GPT, ResidualMLP
from theodolite.planning import init_reading
from theodolite.planning.init_distribution import InitDistribution as Init
from theodolite.planning.init_reading import depth_in_init, read_init, read_with_values, read_without_values

SIZE = Size(64, 2)


class Holder(nn.Module):
    """One parameter, made or filled in some way."""

    def __init__(self, width: int, depth: int, fill: Callable[[int], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(fill(width))


def of(fill: Callable[[int], Tensor], read: Callable = read_init) -> Init:
    return read(partial(Holder, fill=fill), SIZE)["weight"]


def empty(n: int) -> Tensor:
    return torch.empty(n, n)


def copied_trunc_normal(tensor: Tensor, std: float, a: float, b: float) -> Tensor:
    """The inverse-CDF way that many repositories carry a copy of."""
    low, high = (math.erf(edge / std / math.sqrt(2)) for edge in (a, b))
    with torch.no_grad():
        return tensor.uniform_(low, high).erfinv_().mul_(std * math.sqrt(2)).add_(0.0).clamp_(min=a, max=b)


def padded(n: int) -> Tensor:
    tensor = torch.randn(n, n)
    tensor[0].fill_(0)
    return tensor


def column(n: int) -> Tensor:
    tensor = torch.randn(n, n)
    tensor[:, 3] = 0
    return tensor


def by_expert(n: int) -> Tensor:
    tensor = torch.empty(4, n, n)
    for matrix in tensor:
        nn.init.kaiming_normal_(matrix)
    return tensor


EXACT = {
    "normal_": (lambda n: empty(n).normal_(0.1, 0.02), Init("normal", 0.02, 0.1)),
    "uniform_": (lambda n: empty(n).uniform_(-0.5, 1.5), Init("uniform", 1 / math.sqrt(3), 0.5)),
    "kaiming": (lambda n: nn.init.kaiming_normal_(empty(n)), Init("normal", math.sqrt(2 / 64))),
    "xavier": (lambda n: nn.init.xavier_uniform_(empty(n)), Init("uniform", 1 / math.sqrt(64))),
    "randn": (lambda n: torch.randn(n) * 0.02, Init("normal", 0.02)),
    "torch.normal": (lambda n: torch.normal(0.5, 0.02, size=(n, n)), Init("normal", 0.02, 0.5)),
    "rand": (lambda n: 2 * torch.rand(n, n) - 1, Init("uniform", 1 / math.sqrt(3))),
    "one minus": (lambda n: 1 - torch.rand(n, n) / 2, Init("uniform", 1 / math.sqrt(48), 0.75)),
    "a tensor as factor": (lambda n: torch.randn(n, n) * torch.tensor(0.5), Init("normal", 0.5)),
    "zeros": (lambda n: torch.zeros(n), Init("constant")),
    "ones": (lambda n: torch.ones(n), Init("constant", mean=1.0)),
    "full": (lambda n: torch.full((n,), 0.25), Init("constant", mean=0.25)),
    "fill_": (lambda n: empty(n).fill_(3).mul_(0.5), Init("constant", mean=1.5)),
    "like": (
        lambda n: torch.randn_like(torch.zeros(n, n)) + torch.ones(n, n),
        Init("normal", 1.0, 1.0),
    ),
    "the last fill": (lambda n: nn.init.zeros_(nn.init.normal_(empty(n))), Init("constant")),
    "copy_": (lambda n: empty(n).copy_(torch.randn(n, n).T.mul(3).clone()), Init("normal", 3.0)),
    "of another dtype": (
        lambda n: torch.randn(n, n).double().mul_(0.1).float(),
        Init("normal", 0.1),
    ),
    "data": (lambda n: nn.Parameter(torch.randn(n, n)).data.div_(2), Init("normal", 0.5)),
    "by expert": (by_expert, Init("normal", math.sqrt(2 / 64))),
    "joined": (
        lambda n: torch.cat([torch.randn(n, n), torch.randn(2 * n, n)]),
        Init("normal", 1.0),
    ),
    "truncated": (
        lambda n: nn.init.trunc_normal_(empty(n), std=0.5, a=-1, b=1),
        Init("truncated", 0.5 * stats.truncnorm(-2, 2).std(), bound=1.0),
    ),
    "hardly truncated": (
        lambda n: nn.init.trunc_normal_(empty(n), std=0.02),
        Init("truncated", 0.02, bound=2.0),
    ),
    "tightly truncated": (
        lambda n: nn.init.trunc_normal_(empty(n), mean=0.3, std=10, a=0.2, b=0.4),
        Init("truncated", 10 * stats.truncnorm(-0.01, 0.01).std(), mean=0.3, bound=0.1),
    ),
    "a copy of trunc_normal_ that cuts off nothing": (
        lambda n: copied_trunc_normal(empty(n), 0.02, -2, 2),
        Init("normal", 0.02),
    ),
    "a copy of trunc_normal_": (
        lambda n: copied_trunc_normal(empty(n), 0.5, -1, 1),
        Init("truncated", 0.5 * stats.truncnorm(-2, 2).std(), bound=1.0),
    ),
}


@pytest.mark.parametrize("read", [read_with_values, read_without_values])
@pytest.mark.parametrize("way", EXACT)
def test_the_law_is_the_one_in_the_source(way: str, read: Callable) -> None:
    fill, expected = EXACT[way]
    one = of(fill, read)
    assert one.kind == expected.kind
    assert one.std == pytest.approx(expected.std, rel=1e-6)
    assert one.mean == pytest.approx(expected.mean, rel=1e-12, abs=1e-15)
    assert one.bound == (None if expected.bound is None else pytest.approx(expected.bound, rel=1e-6))


OWN = {
    "orthogonal": lambda n: nn.init.orthogonal_(empty(n)),
    "sparse": lambda n: nn.init.sparse_(empty(n), 0.5),
    "dirac": lambda n: nn.init.dirac_(torch.empty(n, n, 3)),
    "eye": lambda n: nn.init.eye_(empty(n)),
    "a row of zeros": padded,
    "a column of zeros": lambda n: torch.randn(n, n).index_fill_(1, torch.tensor([3]), 0.0),
    "a column set to zero": column,
    "log of a range": lambda n: torch.arange(1.0, n + 1).log(),
    "squared": lambda n: torch.randn(n, n) ** 2,
    "clamped": lambda n: torch.randn(n, n).clamp_(-1, 1),
    "one row many times": lambda n: torch.randn(1, n).expand(n, n).clone(),
    "one draw twice": lambda n: (lambda x: torch.cat([x, x]))(torch.randn(n, n)),
    "a std for each": lambda n: torch.normal(torch.zeros(n, n), torch.rand(n, n)),
    "two laws": lambda n: torch.cat([torch.randn(n, n), torch.rand(n, n)]),
    "lopsided truncation": lambda n: nn.init.trunc_normal_(empty(n), std=1.0, a=0, b=1),
    "numpy": lambda n: torch.from_numpy(torch.randn(n, n).numpy() ** 3),
}


@pytest.mark.parametrize("way", OWN)
def test_what_has_no_simple_law_is_the_networks_own_and_is_measured(way: str) -> None:
    one = of(OWN[way])
    values = build_model(partial(Holder, fill=OWN[way]), SIZE, seed=0).weight.detach().double()
    assert one.kind == "own"
    # Measured on the values, or, of a mixture, known: those differ by chance alone.
    assert one.std == pytest.approx(values.std(correction=0).item(), rel=0.05)
    assert one.mean == pytest.approx(values.mean().item(), abs=0.05 * one.std)


@pytest.mark.parametrize("way", sorted(OWN.keys() - {"a row of zeros", "dirac", "two laws"}))
def test_without_values_nothing_is_guessed(way: str) -> None:
    with pytest.raises(UseError, match="smaller base size"):
        of(OWN[way], read_without_values)


def test_values_that_are_all_alike_are_a_constant_however_they_came() -> None:
    assert of(lambda n: torch.arange(n).sign().square().mul(0.0) + 0.5) == Init("constant", mean=0.5)
    assert of(lambda n: torch.tensor([0.25] * n)) == Init("constant", mean=0.25)


def test_a_row_of_zeros_has_the_std_of_the_mixture_even_without_values() -> None:
    one = read_without_values(lambda width, depth: nn.Embedding(10, width, padding_idx=3), SIZE)["weight"]
    assert (one.kind, one.mean) == ("own", 0.0)
    assert one.std == pytest.approx(math.sqrt(0.9))


@pytest.mark.parametrize("read", [read_with_values, read_without_values])
def test_single_entries_that_are_set_are_a_mixture_even_without_values(read: Callable) -> None:
    one = of(OWN["dirac"], read)
    assert (one.kind, one.mean) == ("own", pytest.approx(1 / (3 * 64)))
    assert one.std == pytest.approx(math.sqrt(one.mean * (1 - one.mean)))


def test_entries_set_to_a_complex_number_are_measured() -> None:
    def fill(n: int) -> Tensor:
        tensor = torch.zeros(n, n, dtype=torch.complex64)
        tensor[0], tensor[1, 1] = 1j, 1j
        return tensor

    one = of(fill)
    assert one.kind == "own"
    assert one.std == pytest.approx(math.sqrt(65 / 64**2), rel=0.05)


def test_entries_of_a_tensor_on_meta_may_be_set() -> None:
    def fill(n: int) -> Tensor:
        torch.zeros(n, n, device="meta")[1, 1] = 1.0
        return torch.zeros(n)

    assert of(fill) == Init("constant")


def test_values_written_behind_torchs_back_are_believed_more_than_operations() -> None:
    def fill(n: int) -> Tensor:
        tensor = torch.randn(n, n)
        tensor.numpy()[:] *= 7
        return tensor

    one = of(fill)
    assert one.kind == "own"
    assert one.std == pytest.approx(7, rel=0.05)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_have_the_same_laws(dtype: torch.dtype) -> None:
    assert of(lambda n: torch.empty(n, n, dtype=dtype).normal_(0, 0.02)) == Init("normal", 0.02)
    assert of(lambda n: torch.full((n,), 0.1, dtype=dtype)) == Init("constant", mean=0.1)
    one = of(lambda n: torch.empty(n, n, dtype=dtype).uniform_(-1, 1))
    assert one == Init("uniform", 1 / math.sqrt(3))


def test_torchs_own_modules() -> None:
    class Several(nn.Module):
        def __init__(self, width: int, depth: int) -> None:
            super().__init__()
            self.linear = nn.Linear(width, 8)
            self.conv = nn.Conv2d(width, 8, 3)
            self.table = nn.Embedding(8, width)
            self.attention = nn.MultiheadAttention(width, 4)
            self.norm = nn.LayerNorm(width)
            self.recurrent = nn.LSTM(width, width)
            self.copies = nn.TransformerEncoder(nn.TransformerEncoderLayer(width, 4, batch_first=True), depth)

    found = read_init(Several, SIZE)
    uniform = {name: one.std * math.sqrt(3) for name, one in found.items() if one.kind == "uniform"}
    expected = {
        "linear.weight": 64**-0.5,
        "linear.bias": 64**-0.5,
        "conv.weight": (64 * 9) ** -0.5,
        "conv.bias": (64 * 9) ** -0.5,
        "attention.in_proj_weight": math.sqrt(6 / (64 + 3 * 64)),
        "attention.out_proj.weight": 64**-0.5,
        "recurrent.weight_hh_l0": 64**-0.5,
        "copies.layers.1.linear2.weight": 2048**-0.5,
    }
    assert {name: uniform[name] for name in expected} == pytest.approx(expected)
    assert found["table.weight"] == Init("normal", 1.0)
    assert found["attention.in_proj_bias"] == found["norm.bias"] == Init("constant")
    assert found["norm.weight"] == Init("constant", mean=1.0)
    assert {one.kind for one in found.values()} == {"uniform", "normal", "constant"}


@pytest.mark.parametrize("read", [read_with_values, read_without_values])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("experts", [0, 3])
def test_our_gpt(read: Callable, tied: bool, experts: int) -> None:
    build = partial(GPT, tied=tied, experts=experts, bias=True, qk_norm=True, scaled_init=True, gated=True)
    found = read(build, Size(64, 3))
    down = "blocks.2.feed_forward.branch.down" + ("" if experts else ".weight")
    assert found["embed.weight"] == Init("normal", 1 / 8 if tied else 1.0)
    assert found["blocks.0.attention.branch.query.weight"] == Init("normal", 1 / 8)
    assert found["blocks.0.attention.branch.out.weight"].std == pytest.approx(1 / 8 / math.sqrt(6), rel=1e-15)
    assert found[down].std == pytest.approx((3 * 64 * 6) ** -0.5, rel=1e-15)
    assert found["norm.weight"] == Init("constant", mean=1.0)
    assert found["blocks.0.attention.branch.query.bias"] == Init("constant")
    assert ("readout.weight" in found) == (not tied)
    assert {one.kind for one in found.values()} == {"normal", "constant"}


HUGGING_FACE = {
    "GPT2": {},
    "Llama": {},
    "Qwen3": {"head_dim": 16},
    "Gemma2": {"head_dim": 16},
    "Mixtral": {"num_local_experts": 2},
}


def hugging_face(family: str, width: int, depth: int, **settings: object) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{family}Config")(
        vocab_size=61,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=depth,
        num_attention_heads=width // 16,
        **({} if family == "GPT2" else {"num_key_value_heads": width // 16}),
        max_position_embeddings=32,
        pad_token_id=None,
        bos_token_id=0,
        eos_token_id=0,
        initializer_range=0.03,
        use_cache=False,
        **HUGGING_FACE[family],
        **settings,
    )
    model = "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM"
    return getattr(transformers, model)(config)


@pytest.mark.parametrize("read", [read_with_values, read_without_values])
@pytest.mark.parametrize("family", HUGGING_FACE)
def test_hugging_faces_models(family: str, read: Callable) -> None:
    """They skip their initialisation on the meta device, where torch's defaults would show instead."""
    found = read(partial(hugging_face, family), SIZE)
    gain = 0.0 if family == "Gemma2" else 1.0
    ends = 0.03 / math.sqrt(2 * 2)
    for name, one in found.items():
        if name.endswith("bias"):
            assert one == Init("constant"), name
        elif "norm" in name or "ln_" in name:
            assert one == Init("constant", mean=gain), name
        else:
            std = ends if family == "GPT2" and "c_proj" in name else 0.03
            assert (one.kind, one.std) == ("normal", pytest.approx(std, rel=1e-12)), name


def test_a_network_too_large_for_memory_is_read_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    found = read_init(lambda width, depth: nn.Linear(width, width), Size(2**20, 1))  # four terabytes
    assert found["weight"].std == pytest.approx(2**-10 / math.sqrt(3))
    with pytest.raises(UseError, match=r"weight .* only its values show.*smaller base size"):
        read_init(partial(Holder, fill=lambda n: torch.randn(n, n) ** 2), Size(2**20, 1))
    monkeypatch.setattr(init_reading, "QUICK_PARAMETERS", 10)
    assert of(OWN["orthogonal"]).kind == "own"  # as it fits, its values are looked at after all
    monkeypatch.setattr(init_reading, "MOST_REAL_PARAMETERS", 10)
    with pytest.raises(UseError, match=r"more than 10 parameters the network at 64 × 2.*smaller base size"):
        of(lambda n: torch.ones(n) * torch.randn(1).item())


def test_values_that_are_not_finite_are_refused_by_name() -> None:
    with pytest.raises(UseError, match=r"weight starts with values that are not finite"):
        of(lambda n: torch.full((n,), math.inf).mul_(torch.arange(n)))


def test_reading_leaves_no_trace() -> None:
    state, truncation = torch.get_rng_state(), nn.init._no_grad_trunc_normal_
    kept: list[weakref.ref] = []

    def build(width: int, depth: int) -> nn.Module:
        model = nn.Linear(width, width)
        nn.init.trunc_normal_(model.weight)
        kept.append(weakref.ref(model.weight))
        return model

    def broken(width: int, depth: int) -> nn.Module:
        raise RuntimeError("no")

    for read in (read_with_values, read_without_values):
        read(build, SIZE)
        with pytest.raises(UseError, match="RuntimeError: no"):
            read(broken, SIZE)
    gc.collect()
    assert [reference() for reference in kept] == [None, None]
    assert torch.equal(torch.get_rng_state(), state)
    assert nn.init._no_grad_trunc_normal_ is truncation
    with warnings.catch_warnings(action="error"):
        assert torch.equal(torch.zeros(3) + 1, torch.ones(3))


@pytest.mark.parametrize("cut", [0.05, 0.5, 2.0, 5.0, 100.0])
def test_a_truncated_law_draws_what_scipy_says(cut: float) -> None:
    peer = stats.truncnorm(-cut, cut, loc=0.3, scale=0.7)
    one = Init("truncated", peer.std(), mean=0.3, bound=0.7 * cut)
    values = one.draw((100, 200), torch.Generator().manual_seed(0)).flatten()
    assert stats.kstest(values.numpy(), peer.cdf).pvalue > 0.01
    assert (values - 0.3).abs().max() <= 0.7 * cut * (1 + 1e-6)
    scaled = one.scaled(0.5).draw((100, 200), torch.Generator().manual_seed(0)).flatten()
    torch.testing.assert_close(scaled, values / 2)


@pytest.mark.parametrize(
    ("build", "patterns", "factor"),
    [
        (GPT, (), None),
        (partial(GPT, scaled_init=True), (".out.weight", ".down.weight"), math.sqrt(0.5)),
        (partial(hugging_face, "GPT2"), ("c_proj.weight",), math.sqrt(0.5)),
        (partial(hugging_face, "Llama"), (), None),
        (ResidualMLP, (), None),
    ],
)
def test_an_initialisation_that_knows_the_depth_is_recognised(
    build: Callable, patterns: tuple[str, ...], factor: float | None
) -> None:
    found = depth_in_init(build, SIZE, read_init(build, SIZE))
    names = {name for name in read_init(build, SIZE) if name.endswith(patterns or "none")}
    assert set(found) == names
    assert all(value == pytest.approx(factor) for value in found.values())


def test_another_block_of_the_same_name_is_no_initialisation_that_knows_the_depth() -> None:
    def build(width: int, depth: int) -> nn.Module:
        """As the second half of a U-Net: the last block of a level reads fewer channels than the others."""
        fans = [2 * width] * depth + [width]
        return nn.ModuleList(nn.Linear(fan, width) for fan in fans)

    assert depth_in_init(build, SIZE, read_init(build, SIZE)) == {}


def test_a_stack_of_weights_can_know_the_depth() -> None:
    class Stacked(nn.Module):
        def __init__(self, width: int, depth: int) -> None:
            super().__init__()
            self.down = nn.Parameter(torch.empty(depth, width, width).normal_(0, (width * depth) ** -0.5))

    assert depth_in_init(Stacked, SIZE, read_init(Stacked, SIZE)) == {"down": pytest.approx(0.5**0.5)}
