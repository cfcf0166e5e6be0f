import dataclasses

from theodolite.anatomy import Anatomy, Branch, Part
from theodolite.anatomy.part import fold
from theodolite.surveying.network import CUT, LONGEST, stages
from theodolite.surveying.page import _remarks


def matrix(name, fan_in, fan_out, **more):
    return Part(name, (fan_out, fan_in), "linear", "hidden", fan_in, fan_out, True, True, (1,), (0,), **more)


def gain(name, norm, **more):
    return Part(name, (8,), "norm", "gain", 1, 8, False, True, (), (0,), norm=norm, **more)


def anatomy(*parts):
    places = sorted({(part.block, part.branch) for part in parts if part.block is not None})
    branches = tuple(Branch(block, branch, "peri", 2, (), ()) for block, branch in places)
    return Anatomy({part.name: part for part in parts}, branches)


def test_equal_blocks_are_one_stage_and_another_kind_is_another(surveyed):
    assert [(stage.title, stage.repeats) for stage in stages(surveyed.anatomy)] == [
        ("before the blocks", 1),
        ("blocks 0–2", 3),
        ("after the blocks", 1),
    ]
    sizes = (8, 16, 8)
    mixed = [matrix(f"b.{i}.w", 8, size, block=i, branch=0) for i, size in enumerate(sizes)]
    assert [(stage.title, stage.repeats) for stage in stages(anatomy(*mixed))] == [
        ("blocks 0, 2", 2),
        ("block 1", 1),
    ]


def test_lengths_are_in_proportion_and_a_vocabulary_is_cut():
    parts = [matrix("embed", 5000, 8), matrix("b.0.up", 8, 32, block=0, branch=0)]
    before, block = stages(anatomy(*parts))
    (up,) = block.lanes[0].shapes
    assert (up.width, up.height, up.cut) == (LONGEST / 4, LONGEST, "")
    (embed,) = before.lanes[0].shapes
    assert (embed.width, embed.height, embed.cut) == (CUT, LONGEST / 4, "cut-x")


def test_norms_stand_where_the_signal_meets_them():
    home = {"block": 0, "branch": 0}
    parts = [
        matrix("b.0.q.weight", 8, 8, **home),
        matrix("b.0.o.weight", 8, 8, **home),
        gain("b.0.after.weight", "output", ends_branch=True, **home),
        gain("b.0.before.weight", "input", **home),
        dataclasses.replace(gain("b.0.before.bias", None, **home), role="bias", op="add"),
    ]
    (stage,) = stages(anatomy(*parts))
    assert [shape.label for shape in stage.lanes[0].shapes] == ["before", "before.bias", "q", "o", "after"]


def test_a_scale_vector_inside_a_weight_is_no_norm():
    home = {"block": 0, "branch": 0}
    inside = dataclasses.replace(gain("b.0.q.scale", "input", **home), op="scale")
    parts = [matrix("b.0.k.weight", 8, 8, **home), matrix("b.0.q.weight", 8, 8, **home), inside]
    (stage,) = stages(anatomy(*parts))
    assert [shape.label for shape in stage.lanes[0].shapes] == ["k", "q", "scale"]
    (one,) = fold([inside])
    assert _remarks(one) == "inside a weight"
    (one,) = fold([gain("norm.weight", "input")])
    assert _remarks(one) == "Input-Norm"


def test_fused_rows_are_marked_where_they_meet():
    rows = (((0, 16),), ((16, 24),), ((24, 32),))
    (stage,) = stages(anatomy(matrix("b.0.qkv", 8, 32, block=0, branch=0, rows=rows)))
    assert stage.lanes[0].shapes[0].bands == [50.0, 75.0]
    interleaved = (((0, 8), (16, 24)), ((8, 16), (24, 32)))
    (stage,) = stages(anatomy(matrix("b.0.qkv", 8, 32, block=0, branch=0, rows=interleaved)))
    assert stage.lanes[0].shapes[0].bands == []


def test_a_network_without_blocks_is_one_stage():
    (stage,) = stages(anatomy(matrix("a", 8, 8), matrix("b", 8, 8)))
    assert len(stage.lanes[0].shapes) == 2
