"""Exported Python files: what they draw, multiply, look through and refuse."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from tests.planning.exporting.made import SIZE, TIED, TOKENS, build, gpt_plan, parts, parts_plan, run
from tests.planning.exporting.readers import DeepSpeedMuon, DionMuon, modules
from torch import Tensor, nn

import theodolite as th
from theodolite.planning.exporting.exported import Content
from theodolite.planning.exporting.python_file import folded, grouped, literal
from theodolite.planning.init_distribution import InitDistribution
from theodolite.planning.rows import PlanRow

pytestmark = pytest.mark.usefixtures("one_dissection")


def _same(one: nn.Module, two: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


@pytest.mark.parametrize("format", ["torch", "huggingface", "dion", "deepspeed"])
@pytest.mark.parametrize("tied", [False, True])
def test_initialize_draws_what_the_plan_draws(format: str, tied: bool) -> None:
    plan = gpt_plan("muon", tied=tied)
    text = plan.export(format).text
    for gone in (
        "from dion import Muon",
        "from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam",
    ):
        text = text.replace(gone, "")
    model = run(text).initialize((TIED if tied else build)(SIZE.width, SIZE.depth), seed=7)
    planned = plan.build(seed=7)
    assert _same(model, planned)
    assert torch.equal(model(TOKENS[:, :-1]), planned(TOKENS[:, :-1]))  # with the multiplier, if there is one


@pytest.mark.parametrize(
    "init",
    [
        InitDistribution("uniform", std=0.5, mean=0.25),
        InitDistribution("constant", mean=-2.0),
        InitDistribution("truncated", std=0.4, mean=0.1, bound=0.9),
        InitDistribution("truncated", std=0.0, mean=0.1, bound=0.9),
    ],
)
def test_every_distribution_is_drawn_as_the_plan_draws_it(init: InitDistribution) -> None:
    plan = parts_plan(("wide", "tall"))
    rows = {name: dataclasses.replace(row, init=init) for name, row in plan.rows.items()}
    plan = dataclasses.replace(plan, rows=rows)
    planned, exported = (
        plan.initialize(parts(plan), 3),
        run(plan.export("torch").text).initialize(parts(plan), 3),
    )
    assert _same(planned, exported)


def test_another_seed_draws_other_values() -> None:
    file = run(gpt_plan().export("torch").text)
    one, two = (file.initialize(build(*_size()), seed).embed.weight for seed in (0, 1))
    assert not torch.equal(one, two)


def _size() -> tuple[int, int]:
    return SIZE.width, SIZE.depth


def test_values_of_the_network_itself_are_refused_by_name() -> None:
    plan = parts_plan(("wide",))
    rows = {"wide": dataclasses.replace(plan.rows["wide"], init=InitDistribution("own", std=1.0))}
    plan = dataclasses.replace(plan, rows=rows)
    made = plan.export("torch")
    assert any("initialize refuses" in note and "wide" in note for note in made.notes)
    with pytest.raises(ValueError, match=r"wide starts from values that the network draws"):
        run(made.text).initialize(parts(plan))


def test_a_model_on_meta_is_not_drawn() -> None:
    with torch.device("meta"):
        model = build(*_size())
    with pytest.raises(ValueError, match=r"is on meta"):
        run(gpt_plan().export("torch").text).initialize(model)


@pytest.mark.parametrize(
    "model, said",
    [
        (lambda: build(64, 4), r"embed\.weight has shape \(17, 64\), planned \(17, 32\)"),
        (lambda: build(32, 3), r"the plan has 4 of blocks\.\*\.attention\.norm_in\.weight, the model 3"),
        (lambda: build(32, 5), r"the plan has 4 of .*, the model 5"),
        (
            lambda: th.models.GPT(32, 4, vocab=17, context=8, head_dim=8),
            r"the plan has 4 of .*\.bias, the model 0",
        ),
        (lambda: nn.Linear(2, 2), r"weight is not in the plan; bias is not in the plan"),
    ],
)
def test_another_model_is_refused_with_the_culprits(model: object, said: str) -> None:
    file = run(gpt_plan().export("torch").text)
    for function in (file.make_optimizers, file.initialize, file.param_groups):
        with pytest.raises(ValueError, match=said):
            function(model())  # type: ignore[operator]


def test_a_frozen_tensor_is_refused_by_name() -> None:
    model = build(*_size())
    model.norm.weight.requires_grad_(False)  # type: ignore[union-attr]
    with pytest.raises(ValueError, match=r"norm\.weight is frozen, and the plan trains it"):
        run(gpt_plan().export("torch").text).make_optimizers(model)


class Wrapper(nn.Module):
    """As DistributedDataParallel names its module."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def test_wrappers_are_looked_through() -> None:
    file = run(gpt_plan().export("torch").text)
    plain = file.param_groups(build(*_size()))["AdamW"]
    compiled = torch.compile(build(*_size()))
    for model in (compiled, Wrapper(build(*_size())), Wrapper(compiled)):  # type: ignore[arg-type]
        groups = file.param_groups(model)["AdamW"]
        assert [len(group["params"]) for group in groups] == [len(group["params"]) for group in plain]


@pytest.mark.parametrize("name", ["_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"])
def test_wrappers_of_layers_are_looked_through(name: str) -> None:
    model = build(*_size())
    plain = [id(tensor) for tensor in model.parameters()]
    for layer, block in enumerate(model.blocks):  # type: ignore[arg-type]
        wrapper = nn.Module()
        setattr(wrapper, name, block)
        model.blocks[layer] = wrapper  # type: ignore[index,operator]
    groups = run(gpt_plan().export("torch").text).param_groups(model)["AdamW"]
    assert {id(tensor) for group in groups for tensor in group["params"]} == set(plain)


def test_a_multiplier_finds_its_tensor_among_what_a_module_is_called_with() -> None:
    file = run(gpt_plan(tied=True).export("torch").text)
    double, x = file.InputFactor(2.0), torch.ones(3)
    (mask, doubled), others = double(None, ("mask", x), {"scale": x})
    assert (mask, doubled.tolist(), others["scale"].tolist()) == ("mask", [2, 2, 2], [1, 1, 1])
    (args, named) = double(None, (), {"flag": True, "input": x, "bias": x})
    assert (args, named["flag"], named["input"].tolist(), named["bias"].tolist()) == (
        (),
        True,
        [2] * 3,
        [1] * 3,
    )


def test_a_multiplier_is_attached_once_and_computes_what_the_plan_does() -> None:
    plan = gpt_plan(tied=True)
    file = run(plan.export("torch").text)
    ours = plan.build(seed=0)
    theirs = TIED(*_size())
    theirs.load_state_dict({name: value.clone() for name, value in ours.state_dict().items()})
    plain = theirs(TOKENS[:, :-1])
    file.attach(file.attach(theirs))
    assert torch.equal(theirs(TOKENS[:, :-1]), ours(TOKENS[:, :-1]))
    assert not torch.allclose(plain, ours(TOKENS[:, :-1]))
    assert torch.equal(
        file.attach(ours)(TOKENS[:, :-1]), theirs(TOKENS[:, :-1])
    )  # the plan's hook counts too


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize(
    ("format", "make"),
    [
        ("torch", "make_optimizers"),
        ("huggingface", "make_optimizer"),
        ("dion", "make_optimizer"),
        ("deepspeed", "make_optimizer"),
    ],
)
def test_optimizers_attach_the_multiplier(format: str, make: str, optimizer: str) -> None:
    model = TIED(*_size())
    before = model(TOKENS[:, :-1])
    muon = {"MuonWithAuxAdam": DeepSpeedMuon}
    with modules(dion={"Muon": DionMuon}, deepspeed__runtime__zero__muon__muon_optimizer=muon):
        file = run(gpt_plan(optimizer, tied=True).export(format).text)
    getattr(file, make)(model)
    assert not torch.equal(model(TOKENS[:, :-1]), before)


def test_a_multiplier_without_its_module_is_refused() -> None:
    file = run(gpt_plan(tied=True).export("torch").text)
    with pytest.raises(ValueError, match=r"multiplies the input of readout, and the model has no such"):
        file.attach(nn.Linear(2, 2))


@pytest.mark.parametrize("format", ["torch", "huggingface", "dion", "deepspeed", "torchtitan", "megatron"])
def test_a_multiplier_is_said_with_the_way_out(format: str) -> None:
    made = gpt_plan(tied=True).export(format)
    assert any("attach(model)" in note and "th.surgery.bake" in note for note in made.notes)
    assert "def attach(model):" in made.text


def test_tensors_that_are_left_alone_are_in_no_group() -> None:
    class Half(nn.Module):
        def __init__(self, width: int, depth: int) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(3, width, bias=False), nn.Linear(width, 2, bias=False)
            self.first.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.last(self.first(x).relu())
            return y

    plan = th.plan(Half, torch.zeros(2, 3), size=th.Size(16, 1), base=th.Size(8, 1), lr=0.1)
    file = run(plan.export("torch").text)
    model = Half(16, 1)
    before = model.first.weight.clone()
    (group,) = file.param_groups(file.initialize(model))["AdamW"]
    assert [id(tensor) for tensor in group["params"]] == [id(model.last.weight)]
    assert torch.equal(model.first.weight, before)


def _row(name: str, lr: float) -> PlanRow:
    wide = parts_plan(("wide",)).rows["wide"]
    return dataclasses.replace(wide, name=name, lr=lr)


def test_layers_that_differ_stand_by_name_beside_their_pattern() -> None:
    rows = [_row(f"h.{layer}.w", 0.2 if layer == 1 else 0.1) for layer in range(4)]
    found = folded(rows, lambda row: row.lr)
    assert {pattern: len(some) for pattern, some in found.items()} == {"h.*.w": 3, "h.1.w": 1}


def test_a_pattern_never_stands_for_one_tensor() -> None:
    rows = [_row(f"{layer}.weight", 0.1 * (1 + layer)) for layer in range(3)]
    assert list(folded(rows, lambda row: row.lr)) == ["0.weight", "1.weight", "2.weight"]


def test_layers_that_differ_keep_their_groups() -> None:
    rows = {row.name: row for row in (_row(f"{layer}", 0.2 if layer == 1 else 0.1) for layer in range(4))}
    plan = dataclasses.replace(parts_plan(("wide",)), rows=rows)
    model = nn.ParameterList([torch.zeros(12, 20) for _ in range(4)])
    (muon,) = run(plan.export("torch").text).make_optimizers(model)
    lrs = {id(tensor): group["lr"] for group in muon.param_groups for tensor in group["params"]}
    assert [lrs[id(tensor)] for tensor in model] == [0.1, 0.2, 0.1, 0.1]


def test_equal_settings_make_one_group_and_rounding_makes_no_other() -> None:
    rows = {row.name: row for row in (_row("a", 0.3), _row("b", 0.1 + 0.2), _row("c", 0.4))}
    content = Content("", rows, {}, {"muon": {}}, 0.1, 0.0)
    grouping = grouped(content, lambda row: {"lr": row.lr})
    assert [grouping.members(name) for name in grouping.groups] == [["a", "b"], ["c"]]
    assert len(set(grouping.groups)) == 2


def test_literals_are_read_back() -> None:
    value = {"a": [1, 2.5, None, True, ("x",), ()], "ü\"'": {"b": 1e-08}}
    assert eval(literal(value)) == value


def test_a_title_cannot_end_the_docstring() -> None:
    plan = copy.copy(gpt_plan())
    content = Content('x """ \\ y', plan.rows, {}, {"adamw": {}}, 0.1, 0.0)
    from theodolite.planning.exporting import find_formats

    written = run(find_formats()["torch"].write(content)[0])
    assert (written.__doc__ or "").startswith("x ''' \\ y, for torch.\n")
