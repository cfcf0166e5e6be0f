"""Decay by role against the usual rules, on networks whose norms are known."""

import pytest
import torch
from torch import nn

from theodolite.core.size import Size
from theodolite.models import GPT
from theodolite.surveying import SurveyContext
from theodolite.surveying.sections.decay import _spared_by_name, section

examine = section.run

SMALL = Size(64, 2)


def found(workload, size=SMALL):
    return next(iter(examine(SurveyContext(workload, size))))


def by_gain(finding):
    return {row["gain"]: (row["role"], row["may decay"]) for row in finding.evidence.rows}


def test_gains_of_a_pre_norm_gpt_could_decay(gpt):
    finding = found(gpt())
    assert finding.level == "note"
    assert finding.sentence.startswith("All 5 gains belong to Input-Norms and may decay. ")
    assert set(by_gain(finding).values()) == {("Input-Norm gain", "yes")}


def test_a_tied_head_makes_the_final_norm_an_output_norm(gpt):
    table = by_gain(found(gpt(tied=True)))
    assert table["norm.weight"] == ("Output-Norm gain", "no")
    assert table["blocks.*.attention.norm_in.weight"] == ("Input-Norm gain", "yes")


def test_each_rule_is_about_the_other_kind(gpt):
    """Of two peri-norm blocks, each has two norms before its branches and two behind; the head has one."""
    finding = found(gpt(norm_placement="peri"))
    numbers = finding.evidence.numbers
    assert (numbers["wrong by “everything”"], numbers["wrong by “not vectors”"]) == (4, 0)
    assert (numbers["excluded by “everything”"], numbers["excluded by “not vectors”"]) == (0, 5)
    assert finding.sentence.endswith(
        "If everything decays, 4 decay that should not; if vectors do not decay, 5 that may decay do not; if "
        "norms are excluded by name, 4 decay that should not and 1 that may decay does not."
    )


def test_the_remedy_names_who_decays_and_who_does_not(gpt):
    spared, _, decaying = found(gpt(norm_placement="peri")).remedy.partition("optimizer.")
    assert "blocks.*.attention.norm_in.weight" in decaying
    assert "blocks.*.attention.norm_out.weight" in spared
    assert "norm_out" not in decaying


def test_without_gains_there_is_nothing_to_decay(gpt):
    assert found(gpt(norm_placement="none")).level == "ok"


def test_gains_of_several_kinds_are_counted(gpt):
    said = found(gpt(norm_placement="peri"), Size(64, 1)).sentence
    assert said.startswith("Of 5 gains, 3 belong to Input-Norms and may decay; 2 belong to Output-Norms and ")


class Centred(nn.Module):
    """Multiplies by 1 + γ, or by γ."""

    def __init__(self, width, offset):
        super().__init__()
        self.offset, self.gain = offset, nn.Parameter(torch.full((width,), 1.0 - offset))

    def forward(self, x):
        return nn.functional.rms_norm(x, x.shape[-1:]) * (self.offset + self.gain)


class Block(nn.Module):
    def __init__(self, width, before, offset):
        super().__init__()
        self.norm_in = Centred(width, offset) if before else nn.Identity()
        self.norm_out = Centred(width, offset)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.norm_out(self.down(self.up(self.norm_in(x)).relu()))


def net(before=True, offset=1):
    def build(width, depth):
        blocks = [Block(width, before, offset) for _ in range(depth)]
        return nn.Sequential(nn.Linear(8, width), *blocks, nn.Linear(width, 2))

    return build


def test_where_no_linear_map_reads_a_gain_sparing_them_is_right(rows):
    finding = found(rows(net(before=False, offset=0)))
    assert finding.evidence.numbers["wrong by “not vectors”"] == 0
    # The Trainer of transformers knows no norm by the name `norm_out`.
    assert finding.evidence.numbers["wrong by “not norms, by name”"] == 2
    assert (finding.level, finding.remedy[:12]) == ("note", "Give no weig")


def test_where_the_usual_rules_are_right_there_is_nothing_to_do(rows):
    class Known(Block):
        """Its only norm has a name that the Trainer knows."""

        def __init__(self, width):
            super().__init__(width, before=False, offset=0)
            self.out_norm = self.norm_out
            del self.norm_out

        def forward(self, x):
            return x + self.out_norm(self.down(self.up(x).relu()))

    def build(width, depth):
        return nn.Sequential(nn.Linear(8, width), *(Known(width) for _ in range(depth)), nn.Linear(width, 2))

    finding = found(rows(build), Size(32, 2))
    assert (finding.level, finding.remedy) == ("ok", "")
    assert list(finding.evidence.numbers.values()) == [2, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("offset, codes", [(0, ["TH501"]), (1, ["TH501", "TH502"])])
def test_zero_centred_gains_are_worth_a_note_where_there_are_any(rows, offset, codes):
    findings = list(examine(SurveyContext(rows(net(offset=offset)), Size(32, 2))))
    assert [finding.code for finding in findings] == codes
    if offset:
        assert findings[1].sentence.startswith("4 gains are zero-centred")
        kept, _, spared = findings[1].remedy.partition("Exclude")
        assert "norm_in.gain" in kept
        assert "norm_out.gain" in spared


def test_a_scale_of_three_dimensions_is_no_vector(rows):
    class Scaled(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.up, self.down = nn.Conv2d(width, width, 1), nn.Conv2d(width, width, 1)
            self.layer_scale = nn.Parameter(torch.ones(width, 1, 1))

        def forward(self, x):
            return x + self.layer_scale * self.down(self.up(x).relu())

    class Net(nn.Module):
        def __init__(self, width, depth):
            super().__init__()
            self.first = nn.Conv2d(2, width, 1)
            self.blocks = nn.Sequential(*(Scaled(width) for _ in range(depth)))
            self.last = nn.Linear(width, 2)

        def forward(self, x):
            return self.last(self.blocks(self.first(x.view(-1, 2, 2, 2))).mean((2, 3)))

    finding = found(rows(Net), Size(32, 2))
    assert list(finding.evidence.numbers.values()) == [2, 2, 2, 0, 0, 0]
    assert finding.sentence == (
        "Both gains are elementwise scales and should not decay. "
        "If everything decays, 2 decay that should not; if vectors do not decay, 2 decay that should not."
    )


@pytest.mark.parametrize("family", ["Llama", "GPT2", "T5", "built-in"])
def test_the_rule_by_names_is_that_of_the_trainer(family):
    transformers = pytest.importorskip("transformers")
    if family == "built-in":
        model = GPT(32, 1, norm_placement="peri", qk_norm=True)
    else:
        small = {"vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        named = {
            "Llama": ({**small, "intermediate_size": 32}, "LlamaForCausalLM"),
            "GPT2": ({"vocab_size": 32, "n_embd": 32, "n_layer": 1, "n_head": 2}, "GPT2LMHeadModel"),
            "T5": (
                {"vocab_size": 32, "d_model": 32, "num_layers": 1, "d_ff": 32},
                "T5ForConditionalGeneration",
            ),
        }
        options, head = named[family]
        model = getattr(transformers, head)(getattr(transformers, f"{family}Config")(**options))
    decayed = set(transformers.Trainer.get_decay_parameter_names(None, model))
    layer_norms = [name for name, module in model.named_modules() if isinstance(module, nn.LayerNorm)]
    names = {name for name, _ in model.named_parameters()}
    assert {name for name in names if not _spared_by_name(name, layer_norms)} == decayed & names
