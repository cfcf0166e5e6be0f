"""Configs of transformers are scaled by their own width and depth, whatever they call them."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from theodolite import Size, UseError, dissect, plan, workload
from theodolite.workloads import config_size

transformers = pytest.importorskip("transformers")

COMMON = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 300}
SMALL_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GATED = COMMON | SMALL_TOKENS | {"intermediate_size": 160}
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 64, "n_layer": 4, "n_head": 4, "vocab_size": 300, "n_positions": 32} | SMALL_TOKENS,
    "llama": GATED | {"num_key_value_heads": 2, "dtype": "bfloat16"},
    "qwen3": GATED | {"num_key_value_heads": 2, "head_dim": 32},
    "gemma2": GATED | {"num_key_value_heads": 2, "head_dim": 16, "query_pre_attn_scalar": 16},
    "olmo2": GATED,
    "mixtral": GATED | {"num_key_value_heads": 2, "num_local_experts": 4},
    "qwen3_moe": GATED
    | {
        "num_key_value_heads": 2,
        "moe_intermediate_size": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 16,
    },
    "gpt_neox": GATED,
    "mistral": GATED | {"num_key_value_heads": 2},
    "phi": GATED,
    "falcon": COMMON | SMALL_TOKENS | {"new_decoder_architecture": True, "num_kv_heads": 2},
    "opt": COMMON | SMALL_TOKENS | {"ffn_dim": 256, "word_embed_proj_dim": 64},
    "bloom": {"hidden_size": 64, "n_layer": 4, "n_head": 4, "vocab_size": 300} | SMALL_TOKENS,
    "mamba": {"hidden_size": 64, "num_hidden_layers": 4, "vocab_size": 300, "state_size": 4} | SMALL_TOKENS,
    "bert": GATED | {"is_decoder": False, "architectures": ["BertLMHeadModel"]},
}


@pytest.fixture(autouse=True)
def _no_network(monkeypatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("something wanted to reach the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture
def config(request, tmp_path: Path) -> Path:
    """The file that transformers itself saves for a config."""
    kind = request.param
    transformers.CONFIG_MAPPING[kind](**CONFIGS[kind]).save_pretrained(tmp_path)
    return tmp_path / "config.json"


def _shapes(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def _at(path: Path, width: int, depth: int) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        return _shapes(workload(f"hf:{path}").build(width, depth))


def _layers(shapes: dict[str, tuple[int, ...]]) -> int:
    return len({match.group() for name in shapes if (match := re.search(r"\b(layers?|h|layer)\.\d+", name))})


every_config = pytest.mark.parametrize("config", CONFIGS, indirect=True)


@every_config
def test_at_its_own_size_the_network_is_the_one_transformers_builds(config: Path) -> None:
    assert config_size(config) == config_size(config.parent) == Size(64, 4)
    own = transformers.AutoConfig.from_pretrained(config.parent)
    with torch.device("meta"):
        assert _at(config, 64, 4) == _shapes(transformers.AutoModelForCausalLM.from_config(own))


@every_config
def test_twice_the_width_doubles_dimensions_or_leaves_them(config: Path) -> None:
    here, wider = _at(config, 64, 2), _at(config, 128, 2)
    assert here.keys() == wider.keys()
    for name, shape in here.items():
        if "x_proj" in name:  # mamba's, of which a part is as large as the state
            continue
        factors = {new / old for old, new in zip(shape, wider[name], strict=True)}
        assert factors <= {1.0, 2.0}, name
        # What does not grow belongs to the vocabulary or to one head.
        assert 2.0 in factors or shape in ((300,), (16,), (32,)), name


@every_config
def test_twice_the_depth_doubles_the_layers_and_leaves_their_shapes(config: Path) -> None:
    here, deeper = _at(config, 64, 2), _at(config, 64, 4)
    assert (_layers(here), _layers(deeper)) == (2, 4)
    assert {name: deeper[name] for name in here} == here


@every_config
def test_logits_are_causal_and_begin_near_chance(config: Path) -> None:
    chosen = workload(f"hf:{config}")
    torch.manual_seed(0)
    model = chosen.build(64, 2).eval()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    tokens, targets = chosen.batch(0, 0)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    changed = tokens.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 256
    with torch.no_grad():
        before, after = model(tokens).logits, model(changed).logits
    assert torch.allclose(before[:, :-1], after[:, :-1], atol=1e-5)
    assert not torch.allclose(before[:, -1], after[:, -1], atol=1e-5)
    loss = chosen.evaluate(model, (tokens, targets)).item()
    assert abs(loss - torch.tensor(300.0).log().item()) < 0.6


def test_parameters_of_gpt2_and_llama_are_counted_by_hand(tmp_path: Path) -> None:
    for kind in ("gpt2", "llama"):
        transformers.CONFIG_MAPPING[kind](**CONFIGS[kind]).save_pretrained(tmp_path / kind)
    width, depth = 96, 3
    gpt2 = sum(torch.Size(shape).numel() for shape in _at(tmp_path / "gpt2", width, depth).values())
    assert gpt2 == (300 + 32) * width + depth * (12 * width**2 + 13 * width) + 2 * width
    llama = sum(torch.Size(shape).numel() for shape in _at(tmp_path / "llama", width, depth).values())
    # 6 heads of 16 share 3 key/value heads; the intermediate size is 2.5 times the width.
    block = 2 * width**2 + 2 * width * 3 * 16 + 3 * width * 240 + 2 * width
    assert llama == 2 * 300 * width + depth * block + width


@pytest.mark.parametrize("config", ["mamba"], indirect=True)
def test_the_rank_of_mambas_time_step_is_a_sixteenth_of_its_width(config: Path) -> None:
    """Gu and Dao, Mamba, 2023, section 3.6; its inner width is twice the width, here with a state of 4."""
    for width in (64, 128, 192):
        shapes = _at(config, width, 1)
        assert shapes["backbone.layers.0.mixer.x_proj.weight"] == (width // 16 + 2 * 4, 2 * width)
        assert shapes["backbone.layers.0.mixer.dt_proj.weight"] == (2 * width, width // 16)


def test_layer_types_go_with_the_depth(tmp_path: Path) -> None:
    values = GATED | {"num_hidden_layers": 12, "num_key_value_heads": 2, "head_dim": 16}
    transformers.Gemma3TextConfig(**values).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["layer_types"][5] == "full_attention"
    with torch.device("meta"):
        built = workload(f"hf:{tmp_path}").build(64, 18).config.layer_types
        small = workload(f"hf:{tmp_path}").build(64, 3).config.layer_types
    assert [i for i, kind in enumerate(built) if kind == "full_attention"] == [5, 11, 17]
    assert small == ["sliding_attention", "sliding_attention", "full_attention"]


def test_the_default_size_is_small_and_keeps_whole_groups_of_heads(tmp_path: Path) -> None:
    large = {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    }
    transformers.LlamaConfig(**large).save_pretrained(tmp_path)
    assert config_size(tmp_path) == Size(4096, 32)
    chosen = workload(f"hf:{tmp_path}")
    assert chosen.size == Size(512, 4)  # four heads of 128 share one key/value head
    with torch.device("meta"):
        assert chosen.build(512, 4).config.num_key_value_heads == 1
    assert (chosen.name, chosen.batch(0, 0)[0].shape) == ("hf:llama", (4, 64))


@pytest.mark.parametrize("config", ["qwen3"], indirect=True)
def test_a_width_between_heads_is_refused_with_the_nearest_that_are_not(config: Path) -> None:
    with pytest.raises(UseError, match=r"width is 100, not a multiple of 16 .*give 96 or 112"):
        workload(f"hf:{config}").build(100, 2)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("[1]", "holds a list, not the keys and values of a config"),
        ("{}", "has no model_type"),
        ('{"model_type": "llmaa"}', "is of the model_type 'llmaa', which transformers .* does not have"),
        ('{"model_type": "dac"}', "for 'dac' transformers has no language model, classifier or recogniser"),
        (
            '{"model_type": "mobilenet_v2"}',
            "'mobilenet_v2' has no hidden_size, so its width and depth are unknown",
        ),
        ('{"model_type": "llama", "hidden_size": "wide"}', "was refused by transformers|has no hidden_size"),
    ],
)
def test_what_is_no_config_of_a_model_is_refused(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(UseError, match=message):
        workload(f"hf:{tmp_path}")


def test_a_model_that_does_not_follow_its_config_is_refused(tmp_path: Path) -> None:
    """LongCat's depth is half its num_hidden_layers, and has another name."""
    longcat = pytest.importorskip("transformers.models.longcat_flash").LongcatFlashConfig
    longcat().save_pretrained(tmp_path)
    with pytest.raises(UseError, match=r"has no more parameters than at .* how deep it is"):
        workload(f"hf:{tmp_path}")


def test_a_missing_extra_is_named(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(UseError, match=r"pip install 'theodolite\[hf\]'"):
        workload(f"hf:{tmp_path}")


def test_a_mixture_of_experts_is_dissected_at_its_full_size(tmp_path: Path) -> None:
    large = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 32000}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 8}
    transformers.MixtralConfig(**large, **heads).save_pretrained(tmp_path)
    chosen = workload(f"hf:{tmp_path}")
    anatomy = dissect(chosen.build, chosen.batch(0, 0)[0], size=Size(4096, 2))
    experts = anatomy["model.layers.0.mlp.experts.down_proj"]
    assert (experts.shape, experts.role, experts.ends_branch) == ((8, 4096, 14336), "hidden", True)


BOTH = {"d_model": 64, "encoder_layers": 4, "decoder_layers": 2, "encoder_attention_heads": 4}
BOTH |= SMALL_TOKENS | {"decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128}
SEEN = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_labels": 5}
HEARD = SEEN | {
    "conv_dim": [16, 16],
    "conv_stride": [5, 4],
    "conv_kernel": [10, 4],
    "num_conv_pos_embeddings": 8,
}
HEARD |= {"num_conv_pos_embedding_groups": 4, "vocab_size": 20, "num_feat_extract_layers": 2}
OTHERS: dict[str, tuple[str, dict[str, Any], str | None, str, int]] = {
    # model_type, values, what the config names, what is built, among how many the loss guesses
    "no head": ("bert", GATED, "BertModel", "BertForMaskedLM", 300),
    "nothing named": ("distilbert", {"dim": 64, "n_layers": 4, "n_heads": 4, "hidden_dim": 160}, None,
                      "DistilBertForMaskedLM", 30522),
    "texts": ("bert", GATED, "BertForSequenceClassification", "BertForSequenceClassification", 2),
    "tokens": ("bert", GATED, "BertForTokenClassification", "BertForTokenClassification", 2),
    "t5": ("t5", {"d_model": 64, "d_kv": 16, "d_ff": 160, "num_layers": 4, "num_heads": 4, "vocab_size": 300},
           "T5ForConditionalGeneration", "T5ForConditionalGeneration", 0),
    "bart": ("bart", BOTH | {"vocab_size": 300}, None, "BartForConditionalGeneration", 300),
    "vit": ("vit", SEEN | {"intermediate_size": 128}, "ViTModel", "ViTForImageClassification", 5),
    "convnext": ("convnext", {"hidden_sizes": [64, 128, 256], "depths": [4, 8, 4], "num_stages": 3}, None,
                 "ConvNextForImageClassification", 2),
    "ctc": ("wav2vec2", HEARD, "Wav2Vec2ForCTC", "Wav2Vec2ForCTC", 0),
    "sounds": ("wav2vec2", HEARD, "Wav2Vec2ForSequenceClassification",
               "Wav2Vec2ForSequenceClassification", 5),
    "whisper": ("whisper", BOTH | {"num_mel_bins": 8, "vocab_size": 300}, None,
                "WhisperForConditionalGeneration", 300),
}  # fmt: skip


@pytest.fixture
def other(request, tmp_path: Path) -> tuple[Path, str, int]:
    kind, values, named, built, classes = OTHERS[request.param]
    made = transformers.CONFIG_MAPPING[kind](**values)
    made.architectures = [named] if named else None
    made.save_pretrained(tmp_path)
    return tmp_path, built, classes


@pytest.mark.parametrize("other", OTHERS, indirect=True)
def test_a_config_says_what_is_trained_and_it_begins_near_chance(other: tuple[Path, str, int]) -> None:
    path, built, classes = other
    assert config_size(path) == Size(64, 4)
    chosen = workload(f"hf:{path}")
    torch.manual_seed(0)
    model = chosen.build(64, 1)
    assert type(model).__name__ == built
    loss = chosen.evaluate(model, chosen.batch(0, 0))
    loss.backward()
    if classes:
        assert abs(loss.item() - torch.tensor(float(classes)).log().item()) < 0.6
    first, again, later = (chosen.batch(*at)[1] for at in ((0, 0), (0, 0), (0, 1)))
    assert torch.equal(first, again)
    assert not torch.equal(first, later) or classes == 2


@pytest.mark.parametrize("other", OTHERS, indirect=True)
def test_other_models_grow_with_width_and_depth(other: tuple[Path, str, int]) -> None:
    here, wider, deeper = (_at(other[0], *size) for size in ((64, 2), (128, 2), (64, 4)))
    assert here.keys() == wider.keys()
    for name, shape in here.items():
        factors = {new / old for old, new in zip(shape, wider[name], strict=True)}
        assert factors <= {1.0, 2.0}, name
    assert {name: deeper[name] for name in here} == here
    assert len(deeper) > len(here)


@pytest.mark.parametrize("other", ["t5", "convnext"], indirect=True)
def test_other_models_are_planned(other: tuple[Path, str, int]) -> None:
    chosen = workload(f"hf:{other[0]}")
    inputs = chosen.batch(0, 0)[0]
    rows = plan(chosen.build, inputs, size=Size(128, 1), base=Size(64, 1), lr=0.01).rows
    assert {"gain", "hidden", "input"} <= {row.role for row in rows.values()}
