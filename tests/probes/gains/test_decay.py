"""Which tensors should decay, by networks whose source says who reads a gain."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import theodolite as th
from theodolite.core.errors import UseError
from theodolite.probes.gains.decay import Decay, decay

from .gained import INPUT_GAINS, INPUTS, OUTPUT_GAINS, WORDS, Net, decay_by_name, names, usual

pytestmark = pytest.mark.usefixtures("one_dissection")

# Who should decay


def test_decaying_everything_is_wrong_for_what_sets_the_size_of_a_signal() -> None:
    model = Net()
    found = decay(model, INPUTS, torch.optim.AdamW(model.parameters(), weight_decay=0.2))
    assert names(found.wrong) == OUTPUT_GAINS
    assert {row.should for row in found.wrong} == {0.0}
    assert {row.kind for row in found.wrong} == {"Output-Norm gain", "scale"}


def test_where_vectors_are_spared_what_linear_maps_read_could_decay() -> None:
    model = Net()
    found = decay(model, INPUTS, usual(model))
    assert names(found.advised) == INPUT_GAINS
    assert {row.should for row in found.advised} == {0.2}
    assert found.ok, "that is advice, and nothing wrong"


def test_where_no_weight_decays_no_gain_has_to() -> None:
    model = Net()
    found = decay(model, INPUTS, torch.optim.AdamW(model.parameters(), weight_decay=0.0))
    assert found.ok
    assert "No weight decays" in str(found)


@pytest.mark.parametrize(
    "family, spared, role",
    [
        # By their source: Llama's norms stand before the branches; Gemma2 has both kinds, and its last norm
        # stands before a tied head; OLMo2's stand behind the branches.
        ("Llama", {"input_layernorm", "post_attention_layernorm", "norm"}, "Input-Norm gain"),
        ("Gemma2", {"input_layernorm", "pre_feedforward_layernorm"}, "zero-centred Output-Norm gain"),
        ("Olmo2", {"norm"}, "Output-Norm gain"),
    ],
)
def test_a_trainers_optimizer_and_a_name_that_means_two_things(
    family: str, spared: set[str], role: str, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    tokens = {"vocab_size": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = getattr(transformers, f"{family}Config")(
        **sizes, **tokens, num_key_value_heads=2, head_dim=16, tie_word_embeddings=family == "Gemma2"
    )
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    options = transformers.TrainingArguments(tmp_path, weight_decay=0.3, use_cpu=True, report_to=[])
    optimizer = transformers.Trainer(model, options).create_optimizer()
    found = decay(model, {"input_ids": WORDS}, optimizer)
    assert {name.split(".")[-2] for name in names(found.advised)} == spared
    assert {row.should for row in found.advised} == {0.3}
    by_name = {row.name: row.kind for row in found.rows}
    assert by_name["model.layers.1.post_attention_layernorm.weight"] == role

    before = decay_by_name(model, optimizer)
    found.apply(inputs=True)
    changed = {name for name, value in decay_by_name(model, optimizer).items() if value != before[name]}
    assert changed == names(found.advised)
    mended = decay(model, {"input_ids": WORDS}, optimizer)
    assert mended.ok
    assert not mended.advised
    everything = decay(model, {"input_ids": WORDS}, torch.optim.AdamW(model.parameters()))
    assert names(everything.wrong) == names(everything.gains) - names(found.advised)


@pytest.mark.parametrize("optimizer", ["adamw", "muon-kimi"])
def test_a_plan_decays_by_role_and_what_is_mended_gets_the_plans_decay(optimizer: str) -> None:
    sizes = {"size": th.Size(64, 4), "base": th.Size(16, 2)}
    options = {"lr": 0.01, "weight_decay": 0.1, "optimizer": optimizer}
    model = Net(64, 4)
    rows = th.plan(Net, INPUTS, **sizes, **options).rows
    found = decay(model, INPUTS, th.plan(Net, INPUTS, **sizes, **options).optimizer(model))
    assert found.ok
    assert not found.advised
    assert {row.now.rule for row in found.rows} == {"AdamW"} | (
        {"Muon"} if optimizer == "muon-kimi" else set()
    )
    assert {row.now.decoupled for row in found.rows if row.now.weight_decay} == {True}
    for policy, norms in (("matrices", {"input"}), ("everything", {"output", None})):
        plan = th.plan(Net, INPUTS, **sizes, **options, decay=policy)
        made = plan.optimizer(model)
        found = decay(model, INPUTS, made)
        assert {row.part.norm for row in (*found.wrong, *found.advised)} == norms
        assert found.ok is (policy == "matrices")
        found.apply(inputs=True)
        now = decay_by_name(model, made)
        for row in found.gains:
            assert now[row.name] == pytest.approx(rows[row.name].weight_decay, rel=1e-6), row.name
        model(INPUTS).sum().backward()
        made.step()


@pytest.mark.parametrize("form", ["direction", "product"])
def test_inside_a_weight_scales_decay_and_directions_do_not(form: str) -> None:
    """`β·α/rms(α)` does not change with the size of α; `β·α` does."""
    model = th.models.GPT(32, 1, vocab=32, context=8, head_dim=16)
    model, _ = th.surgery.scale_vectors(model, WORDS, reparameterization=form)
    free = {
        name for name, _ in model.named_parameters() if form == "direction" and name.endswith(".direction")
    }
    inside = {name for name, _ in model.named_parameters() if "parametrizations.weight.0" in name} - free
    assert bool(free) == (form == "direction")
    everything = torch.optim.AdamW(model.parameters(), weight_decay=0.2)
    assert names(decay(model, WORDS, everything).wrong) == free
    spared = usual(model)
    found = decay(model, WORDS, spared)
    assert names(found.advised) == inside
    assert {row.kind for row in found.advised if "weight.0.inputs" in row.name} == {"scale vector"}
    found.apply(inputs=True)
    assert {name for name, value in decay_by_name(model, spared).items() if value == 0} == free


# What is only noted


def test_decay_of_what_is_divided_by_its_own_norm_only_lengthens_its_steps() -> None:
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), nn.Linear(8, 2))
    found = decay(model, INPUTS, torch.optim.AdamW(model.parameters(), weight_decay=0.1))
    (free,) = [row for row in found.rows if row.part.scale_free]
    assert (free.name, free.verdict) == ("0.parametrizations.weight.original1", "note")
    assert "only its direction counts" in free.why


def test_biases_tables_and_ties_are_noted_and_left_alone() -> None:
    model = th.models.GPT(32, 1, vocab=32, context=8, head_dim=16, tied=True)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    found = decay(model, WORDS, optimizer)
    (table,) = [row for row in found.rows if row.kind == "tied table"]
    assert (table.name, table.verdict, table.should) == ("embed.weight", "note", None)
    model = Net()
    found = decay(model, INPUTS, torch.optim.AdamW(model.parameters(), weight_decay=0.1))
    biases = [row for row in found.rows if row.kind == "bias"]
    assert names(biases) == {name for name, _ in model.named_parameters() if name.endswith("bias")}
    assert {(row.verdict, row.should) for row in biases} == {("note", None)}


def test_a_table_whose_rows_only_fade_is_noted_if_it_decays() -> None:
    model = nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 32))
    table = decay(model, WORDS, torch.optim.AdamW(model.parameters(), weight_decay=0.1)).rows[0]
    assert (table.kind, table.verdict) == ("table", "note")
    spared = [{"params": model[0].parameters(), "weight_decay": 0.0}, {"params": model[1].parameters()}]
    assert decay(model, WORDS, torch.optim.AdamW(spared)).rows[0].verdict == "right"


def test_a_zero_centred_gain_is_pulled_to_one() -> None:
    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain, self.linear = nn.Parameter(torch.zeros(8)), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(nn.functional.rms_norm(x, (8,)) * (1 + self.gain))

    model = Centred()
    row = decay(model, INPUTS, torch.optim.AdamW(model.parameters(), weight_decay=0.1)).rows[0]
    assert (row.kind, row.verdict) == ("zero-centred Input-Norm gain", "note")
    assert "to one, not to zero" in row.why


def test_frozen_forgotten_and_doubled_tensors_are_told_apart() -> None:
    model = Net()
    model.norm.weight.requires_grad_(False)
    model.blocks[0].after.weight.requires_grad_(False)
    left_out = model.blocks[1].before.weight
    twice = model.blocks[1].after.weight
    first = torch.optim.AdamW([p for p in model.parameters() if p is not left_out], weight_decay=0.1)
    second = torch.optim.SGD([twice], lr=0.1)
    found = decay(model, INPUTS, [first, second])
    rows = {row.name: row for row in found.rows}
    assert rows["norm.weight"].now.state == rows["blocks.0.after.weight"].now.state == "frozen"
    assert rows["norm.weight"].verdict == rows["blocks.0.after.weight"].verdict == "right"
    assert (rows["blocks.1.before.weight"].now.state, rows["blocks.1.before.weight"].verdict) == (
        "absent",
        "note",
    )
    assert (rows["blocks.1.after.weight"].now.state, rows["blocks.1.after.weight"].verdict) == (
        "twice",
        "wrong",
    )
    with pytest.raises(UseError, match=r"blocks\.1\.after\.weight: 2 groups train it.*by hand"):
        found.apply()


def test_two_optimizers_share_a_network_and_each_is_mended() -> None:
    model = Net()
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    both = [
        torch.optim.Muon(matrices, lr=0.02, weight_decay=0.3),
        torch.optim.AdamW(vectors, lr=0.001, weight_decay=0.0),
    ]
    found = decay(model, INPUTS, both)
    assert names(found.advised) == INPUT_GAINS
    with pytest.raises(UseError, match="2 optimizers"):
        found.groups()
    found.apply(inputs=True)
    now = decay_by_name(model, both[1])
    assert {name for name, value in now.items() if value == 0.3} == INPUT_GAINS


# Wrappers, traces, bad input


@pytest.mark.parametrize("wrap", [partial(torch.compile, backend="eager"), nn.DataParallel])
def test_names_are_canonical_inside_a_wrapper(wrap: Any) -> None:
    model = wrap(Net())
    assert names(decay(model, INPUTS, usual(model)).advised) == INPUT_GAINS


def test_an_optimizer_inside_another_object_is_seen() -> None:
    accelerate = pytest.importorskip("accelerate")
    model = Net()
    wrapped = accelerate.Accelerator(cpu=True).prepare_optimizer(usual(model))
    found = decay(model, INPUTS, wrapped)
    assert names(found.advised) == INPUT_GAINS
    assert {row.now.rule for row in found.rows} == {"AdamW"}


def test_looking_leaves_no_trace() -> None:
    model = Net().train()
    model.blocks[0].eval()
    optimizer = usual(model)
    model(INPUTS).sum().backward()
    optimizer.step()
    grads = [p.grad for p in model.parameters()]
    kept = copy.deepcopy((model.state_dict(), optimizer.state_dict(), torch.get_rng_state()))
    str(decay(model, INPUTS, optimizer))
    torch.testing.assert_close(
        (model.state_dict(), optimizer.state_dict(), torch.get_rng_state()), kept, rtol=0, atol=0
    )
    assert [module.training for module in (model, model.blocks[0], model.blocks[1])] == [True, False, True]
    assert all(p.grad is grad for p, grad in zip(model.parameters(), grads, strict=True))


def test_an_optimizer_of_another_model_is_refused() -> None:
    with pytest.raises(UseError, match=r"AdamW trains 21 tensors, none of which is a parameter of this Net"):
        decay(Net(), INPUTS, usual(Net()))


def test_tensors_of_others_are_counted() -> None:
    model, other = Net(), nn.Linear(2, 2)
    optimizer = usual(model)
    optimizer.add_param_group({"params": list(other.parameters())})
    found = decay(model, INPUTS, optimizer)
    assert found.strangers == 2
    assert "2 tensors that this network does not have" in " ".join(str(found).split())


@pytest.mark.parametrize("given", ["adamw", None, []])
def test_what_is_no_optimizer_is_refused(given: Any) -> None:
    with pytest.raises(UseError, match="optimizer is"):
        decay(Net(), INPUTS, given)


def test_a_network_without_gains_is_nothing_to_do() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.RMSNorm(16, elementwise_affine=False), nn.Linear(16, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    found = decay(model, INPUTS, optimizer)
    assert found.ok
    assert str(found).startswith("This network has no gains: nothing to do.")
    found.apply()
    assert len(optimizer.param_groups) == 1


def test_the_table_folds_blocks_and_counts_what_is_wrong() -> None:
    model = Net()
    found: Decay = decay(model, INPUTS, usual(model))
    said = str(found)
    assert " ".join(said.split()).startswith(
        "Weight decay is wrong for none of 7 gains. By the scale-vector paper 3 could decay. "
        "8 of 8 weights decay, lr·λ = 0.002 per step"
    )
    cells = {line.split()[0]: line.split() for line in said.splitlines() if line}
    assert cells["blocks.*.before.weight"][1:] == ["Input-Norm", "gain", "0", "0.2", "advice"]
    assert cells["blocks.*.after.weight"][1:] == ["Output-Norm", "gain", "0", "0"]
