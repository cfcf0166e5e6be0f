"""What `dissect` finds in well-known networks is what their source says.

The first tests check the tables themselves against the running networks, without `dissect`: names, shapes
and ties; which fans grow; which branch a tensor is in; who reads an Input-Norm's gain.
"""

from __future__ import annotations

import dataclasses
from fnmatch import fnmatchcase
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from theodolite.anatomy.part import Anatomy
from theodolite.core.calling import call, logits

from .golden import GOLDENS, Golden

pytest.importorskip("transformers")
each_network = pytest.mark.parametrize("golden", [pytest.param(g, id=name) for name, g in GOLDENS.items()])


@each_network
def test_the_table_names_every_parameter_once(golden: Golden) -> None:
    model = golden.build(golden.size.width, golden.size.depth)
    ties: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        ties.setdefault(id(parameter), []).append(name)
    actual = {name: (tuple(p.shape), tuple(ties[id(p)][1:])) for name, p in model.named_parameters()}
    table = golden.table(golden.size.width, golden.size.depth)
    assert {name: (part.shape, part.tied) for name, part in table.parts().items()} == actual


@each_network
def test_the_fans_that_the_table_says_grow_do_grow(golden: Golden) -> None:
    width, depth = golden.size.width, golden.size.depth
    small = {name: p.shape for name, p in golden.build(width, depth).named_parameters()}
    large = {name: p.shape for name, p in golden.build(2 * width, depth).named_parameters()}
    for name, part in golden.table(width, depth).parts().items():
        grown = {axis for axis in range(len(part.shape)) if large[name][axis] != small[name][axis]}
        assert part.width_in == bool(grown & set(part.in_axes)), name
        assert part.width_out == bool(grown & set(part.out_axes)), name
        assert grown <= {*part.in_axes, *part.out_axes}, name


@each_network
def test_silencing_the_ends_of_a_branch_cuts_off_the_tensors_in_it_and_no_others(golden: Golden) -> None:
    table = golden.table(golden.size.width, golden.size.depth)
    model = _perturbed(golden)
    usual = _gradients(golden, model)
    # A key's bias shifts all logits of a query alike, so the softmax never sees it: no gradient anywhere.
    largest = max(float(g.abs().max()) for g in usual.values())
    seen = {name for name, g in usual.items() if float(g.abs().max()) > 1e-6 * largest}
    named = dict(model.named_parameters())
    for branch in table.branches().values():
        before = {name: named[name].detach().clone() for name in branch.ends}
        with torch.no_grad():
            for name in branch.ends:
                named[name].fill_(golden.silent)
        gradients = _gradients(golden, model)
        with torch.no_grad():
            for name in branch.ends:
                named[name].copy_(before[name])
        cut = {name for name, g in gradients.items() if not g.any()} & seen
        shared = {name for name in branch.parts if any(fnmatchcase(name, p) for p in golden.shared)}
        assert cut == set(branch.parts) & seen - set(branch.ends) - shared, (branch.block, branch.branch)


@each_network
def test_the_readers_of_an_input_norm_are_all_its_readers(golden: Golden) -> None:
    """If only W reads x = γ∘n + β, then γ∘∂γ + β∘∂β = Σ_rows W∘∂W (formulas.md §4)."""
    table = golden.table(golden.size.width, golden.size.depth)
    model = _perturbed(golden)
    gradients, parts = _gradients(golden, model), table.parts()
    named = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for name, readers in table.readers().items():
        assert readers, name
        left = (named[name] - golden.silent) * gradients[name]
        shift = name.removesuffix("weight") + "bias"
        if shift in named:
            left = left + named[shift] * gradients[shift]
        right = torch.zeros_like(left)
        for reader in readers:
            channel = parts[reader].in_axes[0]
            others = [axis for axis in range(named[reader].dim()) if axis != channel]
            right = right + (named[reader] * gradients[reader]).sum(others)
        torch.testing.assert_close(left, right, rtol=1e-3, atol=1e-4 * float(right.abs().max()), msg=name)


@each_network
def test_without_its_last_rows_nothing_reads_the_others_of_a_fused_tensor(golden: Golden) -> None:
    """Values that are zero leave queries and keys without effect; so does `up` to `gate`."""
    parts = golden.table(golden.size.width, golden.size.depth).parts()
    for name in (name for name, part in parts.items() if part.rows and part.op == "linear"):
        model = _perturbed(golden)
        named = dict(model.named_parameters())
        fused = {name, name.replace("weight", "bias")} & set(named)
        with torch.no_grad():
            for tensor in fused:
                for start, stop in parts[tensor].rows[-1]:
                    named[tensor].narrow(parts[tensor].out_axes[0], start, stop - start).zero_()
        gradients = _gradients(golden, model)
        for tensor in fused:
            by_row = gradients[tensor].movedim(parts[tensor].out_axes[0], 0)
            alive = by_row.reshape(len(by_row), -1).any(1)
            last = torch.zeros_like(alive)
            for start, stop in parts[tensor].rows[-1]:
                last[start:stop] = True
            assert torch.equal(alive, last), tensor


@each_network
def test_dissect_finds_what_the_source_says(golden: Golden) -> None:
    anatomy = _dissect(golden)
    expected = golden.table(golden.size.width, golden.size.depth).parts()
    assert sorted(anatomy) == sorted(expected)
    wrong = [
        f"{name}.{field.name}: {getattr(anatomy[name], field.name)!r}, by the source {value!r}"
        for name, part in expected.items()
        for field in dataclasses.fields(part)
        if field.name not in ("grown_axes", "uses", "beside")  # not in the tables; see test_axes and below
        and (value := getattr(part, field.name)) != getattr(anatomy[name], field.name)
    ]
    assert not wrong, "\n" + "\n".join(wrong)


@each_network
def test_a_bias_is_beside_the_weight_of_its_layer(golden: Golden) -> None:
    anatomy = _dissect(golden)
    for name, part in anatomy.items():
        weight = anatomy.get(name.removesuffix("bias") + "weight")
        if weight is not None and weight.op in ("linear", "conv") and name.endswith("bias"):
            assert part.beside == weight.name


@each_network
def test_dissect_finds_the_branches_of_the_source(golden: Golden) -> None:
    found = {(branch.block, branch.branch): branch for branch in _dissect(golden).branches}
    expected = golden.table(golden.size.width, golden.size.depth).branches()
    assert sorted(found) == sorted(expected)
    for key, branch in expected.items():
        actual = found[key]
        assert actual.placement == branch.placement, key
        assert actual.layers == branch.layers, key
        assert tuple(sorted(actual.parts)) == branch.parts, key
        assert tuple(sorted(actual.ends)) == branch.ends, key
        assert (actual.attention is None) == (branch.attention is None), key
        if actual.attention is not None and branch.attention is not None:
            assert dataclasses.astuple(actual.attention) == pytest.approx(
                dataclasses.astuple(branch.attention)
            )


@each_network
def test_the_same_is_found_without_values(golden: Golden, monkeypatch: pytest.MonkeyPatch) -> None:
    with_values = _dissect(golden)
    monkeypatch.setattr("theodolite.anatomy.recording.trace._MOST_REAL_PRODUCTS", 0)
    without = _dissect.__wrapped__(golden)
    assert (dict(without), without.branches) == (dict(with_values), with_values.branches)


@cache
def _dissect(golden: Golden) -> Anatomy:
    from theodolite.anatomy import dissect

    return dissect(golden.build, golden.inputs(), size=golden.size)


def _perturbed(golden: Golden) -> nn.Module:
    """The network with gains that are not one, biases that are not zero, and no tensor at a special place."""
    torch.manual_seed(0)
    model = golden.build(golden.size.width, golden.size.depth).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def _gradients(golden: Golden, model: nn.Module) -> dict[str, Tensor]:
    model.zero_grad()
    output = logits(call(model, golden.inputs()))
    target = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    (output * target).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
