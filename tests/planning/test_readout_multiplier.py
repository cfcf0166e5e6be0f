"""The readout of a tied embedding keeps a real multiplier, through all that is done to a network."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn import functional as F

import theodolite as th
from theodolite import Size, UseError
from theodolite.models import GPT
from theodolite.planning.readout_multiplier import (
    attach_multipliers,
    detach_multipliers,
    missing,
    warn_of_missing,
)

from .test_initialising import hugging_face

pytestmark = pytest.mark.usefixtures("one_dissection")

TOKENS = torch.arange(8)[None]
WIDE, NARROW = Size(256, 1), Size(64, 1)
tied_gpt = partial(GPT, tied=True)


def planned(build: Callable, size: Size = WIDE, base: Size = NARROW) -> th.Plan:
    return th.plan(build, TOKENS, size=size, base=base, lr=2**-8)


def logits(model: nn.Module) -> Tensor:
    output = model(TOKENS)
    return output if isinstance(output, Tensor) else output.logits


class Head(nn.Module):
    """A language model whose head shares the table, in one of several ways."""

    def __init__(self, width: int, depth: int, way: str, bias: bool = False) -> None:
        super().__init__()
        self.way = way
        if way == "head first":
            self.head = nn.Linear(width, 11, bias=bias)
        self.embed = nn.Embedding(11, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        if way in ("module", "keyword"):
            self.head = nn.Linear(width, 11, bias=bias)
        if way == "own attribute":
            self.table = self.embed.weight
        if hasattr(self, "head"):
            self.head.weight = self.embed.weight
            if bias:
                nn.init.ones_(self.head.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x).relu()
        if self.way == "function":
            return F.linear(x, self.embed.weight)
        if self.way == "product":
            return x @ self.embed.weight.T
        if self.way == "own attribute":
            return x @ self.table.T
        return self.head(input=x) if self.way == "keyword" else self.head(x)


@pytest.mark.parametrize(
    ("build", "module"),
    [
        (tied_gpt, "readout"),
        (partial(tied_gpt, norm_placement="none"), "readout"),
        (partial(Head, way="module"), "head"),
        (partial(Head, way="keyword"), "head"),
        (partial(Head, way="head first"), "head"),
        (partial(hugging_face, "GPT2"), "lm_head"),
        (partial(hugging_face, "Qwen2", tied=True), "lm_head"),
    ],
    ids=["gpt", "gpt-no-norm", "module", "keyword", "head-first", "hf-gpt2", "hf-qwen"],
)
def test_the_logits_are_those_of_the_bare_network_divided_by_the_ratio_of_widths(
    build: Callable, module: str
) -> None:
    plan = planned(build)
    assert plan.multipliers == {module: 0.25}
    model = plan.build(seed=0).eval()
    bare = build(256, 1).eval()
    bare.load_state_dict(model.state_dict())
    assert logits(bare).abs().max() > 0
    torch.testing.assert_close(logits(model), logits(bare) / 4)
    # Width alone: the same at another depth.
    assert planned(build, Size(256, 2), NARROW).multipliers == {module: 0.25}


def test_the_tied_tensor_itself_follows_the_rule_of_a_table() -> None:
    plan, untied = planned(tied_gpt), planned(GPT)
    assert plan["embed.weight"].multiplier == 0.25
    assert (plan["embed.weight"].lr, untied["embed.weight"].lr) == (2**-8, 2**-8)
    assert plan["embed.weight"].init.std == 64**-0.5  # as at base size
    assert {row.multiplier for row in untied.rows.values()} == {1.0}


def test_a_bias_of_the_readout_is_not_scaled() -> None:
    build = partial(Head, way="module", bias=True)
    model = planned(build).build(seed=0)
    bare = build(256, 1)
    bare.load_state_dict(model.state_dict())
    torch.testing.assert_close(logits(model) - 1, (logits(bare) - 1) / 4)


@pytest.mark.parametrize(
    ("build", "size", "base"),
    [
        (GPT, WIDE, NARROW),
        (tied_gpt, Size(64, 2), NARROW),
        (partial(Head, way="function"), NARROW, NARROW),
    ],
)
def test_there_is_nothing_where_nothing_is_tied_or_the_width_stays(
    build: Callable, size: Size, base: Size
) -> None:
    plan = planned(build, size, base)
    assert plan.multipliers == {}
    assert not any(module._forward_pre_hooks for module in plan.build().modules())


@pytest.mark.parametrize("way", ["function", "product", "own attribute"])
def test_a_readout_without_a_module_is_refused_with_a_remedy(way: str) -> None:
    with pytest.raises(
        UseError, match=r"(embed.weight|table) is both the table.*multiplier 0.25.*head.weight = embed"
    ):
        planned(partial(Head, way=way))


def test_a_network_that_is_a_table_alone_is_refused_too() -> None:
    class Table(nn.Module):
        def __init__(self, width: int, depth: int) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(11, width))

        def forward(self, tokens: Tensor) -> Tensor:
            return self.table[tokens].tanh() @ self.table.T

    with pytest.raises(UseError, match=r"table is both the table"):
        planned(Table)


def test_attaching_twice_is_attaching_once_and_the_last_plan_counts() -> None:
    plan, wider = planned(tied_gpt), planned(tied_gpt, base=Size(32, 1))
    bare = tied_gpt(256, 1)
    expected = logits(bare)
    model = copy.deepcopy(bare)
    for _ in range(3):
        assert plan.attach(model) is model
    torch.testing.assert_close(logits(model), expected / 4)
    wider.attach(model)
    torch.testing.assert_close(logits(model), expected / 8)
    planned(tied_gpt, base=WIDE).attach(model)
    torch.testing.assert_close(logits(model), expected)


def test_other_hooks_stay() -> None:
    model = tied_gpt(256, 1)
    seen = []
    model.readout.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    planned(tied_gpt).attach(planned(tied_gpt).attach(model))
    logits(model)
    assert len(seen) == 1


def test_it_survives_a_deep_copy_saving_and_wrappers() -> None:
    plan = planned(tied_gpt)
    model = plan.build(seed=0)
    expected = logits(model)
    assert torch.equal(logits(copy.deepcopy(model)), expected)
    assert torch.equal(logits(checkpoint_wrapper(model)), expected)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert torch.equal(logits(torch.load(file, weights_only=False)), expected)
    # Through a wrapper, onto the network inside.
    again = tied_gpt(256, 1)
    again.load_state_dict(model.state_dict())
    wrapped = plan.attach(checkpoint_wrapper(again))
    assert torch.equal(logits(wrapped), expected)
    assert len(again.readout._forward_pre_hooks) == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own, on machines with CUDA
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_it_compiles_into_one_graph(backend: str) -> None:
    plan = planned(tied_gpt)
    model = plan.build(seed=0)
    expected = logits(model)
    torch.compiler.reset()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    torch.testing.assert_close(logits(compiled), expected)
    fresh = torch.compile(tied_gpt(256, 1), backend=backend, fullgraph=True)
    plan.initialize(fresh, seed=0)
    torch.testing.assert_close(logits(fresh), expected)
    torch.compiler.reset()


@pytest.fixture
def as_torch_has_it() -> Iterator[None]:
    """`torch.compile` does not look at hooks, as when a process begins."""
    torch.compiler.reset()
    with torch._dynamo.config.patch(skip_nnmodule_hook_guards=True):
        yield
    torch.compiler.reset()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.usefixtures("as_torch_has_it")
def test_what_was_compiled_without_it_is_not_run_with_it() -> None:
    plain = Head(8, 1, "module")
    bare = logits(plain)
    compiled = torch.compile(plain, backend="eager")
    torch.testing.assert_close(logits(compiled), bare)
    model = copy.deepcopy(plain)
    attach_multipliers(model, {"head": 0.25})
    torch.testing.assert_close(logits(torch.compile(model, backend="eager")), bare / 4)
    torch.testing.assert_close(logits(compiled), bare)
    attach_multipliers(plain, {"head": 0.5})
    torch.testing.assert_close(logits(compiled), bare / 2)


def test_a_saved_state_says_which_multiplier_it_was_trained_with() -> None:
    model = tied_gpt(32, 1, vocab=16)
    keys = list(model.state_dict())
    attach_multipliers(model, {"readout": 0.25})
    file = io.BytesIO()
    torch.save(nn.ModuleDict({"inner": model}).state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    assert list(state) == [f"inner.{key}" for key in keys]
    assert state._metadata["inner.readout"]["theodolite_multiplier"] == 0.25
    plain = nn.ModuleDict({"inner": tied_gpt(32, 1, vocab=16)})
    plain.load_state_dict(state)  # whatever is saved fits the plain network
    for again in (model, copy.deepcopy(model)):
        nn.ModuleDict({"inner": again}).load_state_dict(state)
        again.load_state_dict(dict(plain["inner"].state_dict()))  # of which nothing is known
        with pytest.warns(UserWarning, match="without a multiplier on the input of readout, .* has 0.25"):
            again.load_state_dict(plain["inner"].state_dict())
    detach_multipliers(model)
    assert "theodolite_multiplier" not in model.state_dict()._metadata["readout"]
    model.load_state_dict(plain["inner"].state_dict())


def test_a_hugging_face_config_says_it_too() -> None:
    model = hugging_face("GPT2", 32, 1)
    outer = nn.ModuleDict({"inner": model})
    attach_multipliers(outer, {"inner.lm_head": 0.25})
    assert model.config.theodolite == {"multipliers": {"lm_head": 0.25}}
    assert missing(outer) == {}
    again = type(model)(model.config)
    assert missing(again) == {"lm_head": 0.25}
    with pytest.warns(UserWarning, match=r"trained with the input of lm_head multiplied by 0.25"):
        warn_of_missing(again)
    detach_multipliers(outer)
    assert missing(again) == {}
    model.config.theodolite = {"multipliers": {"lm_head": "0.25"}}
    with pytest.raises(UseError, match="finite numbers other than 0"):
        missing(model)


def test_another_network_is_refused() -> None:
    with pytest.raises(
        UseError, match=r"multiplies the input of readout by 0.25.*Linear has no module readout"
    ):
        planned(tied_gpt).attach(nn.Linear(2, 2))


def test_bf16_stays_bf16() -> None:
    model = planned(tied_gpt).build(seed=0).bfloat16()
    assert logits(model).dtype == torch.bfloat16
