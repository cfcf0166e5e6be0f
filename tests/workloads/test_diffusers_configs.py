"""Configs of diffusers are scaled by their own keys, and trained on velocities of noisy latents."""

from __future__ import annotations

import hashlib
import json
import math
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from theodolite import Size, UseError, Workload, dissect, flows, workload
from theodolite.cli import main
from theodolite.fleet.provenance import environment
from theodolite.workloads import config_size

diffusers = pytest.importorskip("diffusers")

PATCHES = {"num_attention_heads": 4, "attention_head_dim": 8, "num_layers": 2, "in_channels": 4}
PATCHES |= {"sample_size": 8, "patch_size": 2}
TEXT = {"joint_attention_dim": 20, "pooled_projection_dim": 12}
LEVELS: dict[str, Any] = {"block_out_channels": [16, 32], "layers_per_block": 1, "norm_num_groups": 4}
LEVELS |= {"sample_size": 16, "in_channels": 3, "out_channels": 3}
CONFIGS: dict[str, dict[str, Any]] = {
    "dit": PATCHES
    | {"_class_name": "DiTTransformer2DModel", "out_channels": 8, "num_embeds_ada_norm": 10, "dropout": 0.1},
    "old dit": PATCHES
    | {"_class_name": "Transformer2DModel", "norm_type": "ada_norm_zero", "num_embeds_ada_norm": 10}
    | {"attention_bias": True, "norm_elementwise_affine": False, "activation_fn": "gelu-approximate"},
    "pixart": PATCHES
    | {"_class_name": "PixArtTransformer2DModel", "caption_channels": 20, "cross_attention_dim": 48}
    | {"num_attention_heads": 6, "sample_size": 128},
    "sd3": PATCHES
    | TEXT
    | {"_class_name": "SD3Transformer2DModel", "caption_projection_dim": 32, "out_channels": 4}
    | {"pos_embed_max_size": 8, "qk_norm": "rms_norm", "dual_attention_layers": [0]},
    "flux": TEXT
    | {"_class_name": "FluxTransformer2DModel", "num_attention_heads": 2, "attention_head_dim": 16}
    | {"axes_dims_rope": [4, 6, 6], "in_channels": 16, "num_layers": 2, "num_single_layers": 4}
    | {"guidance_embeds": True},
    "unet": LEVELS
    | {"_class_name": "UNet2DModel", "attention_head_dim": 8, "num_class_embeds": 5}
    | {"down_block_types": ["DownBlock2D", "AttnDownBlock2D"]}
    | {"up_block_types": ["AttnUpBlock2D", "UpBlock2D"]},
    "text unet": LEVELS
    | {"_class_name": "UNet2DConditionModel", "attention_head_dim": [2, 4], "cross_attention_dim": 20}
    | {"down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"]}
    | {"up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"], "addition_embed_type": "text_time"}
    | {"addition_time_embed_dim": 4, "projection_class_embeddings_input_dim": 36},
}  # fmt: skip
OWN = {name: Size(32, 2) for name in ("dit", "old dit", "sd3", "flux")}
OWN |= {"pixart": Size(48, 2), "unet": Size(16, 1), "text unet": Size(16, 1)}
every_config = pytest.mark.parametrize("name", CONFIGS)


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("something wanted to reach the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("configs")
    found = {name: folder / f"{name}.json" for name in CONFIGS}
    for name, file in found.items():
        file.write_text(json.dumps(CONFIGS[name]))
    return found


@pytest.fixture(scope="module")
def chosen(files: dict[str, Path]) -> dict[str, Workload]:
    return {name: workload(f"diffusers:{file}") for name, file in files.items()}


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def _at(one: Workload, width: int, depth: int) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        return _shapes(one.build(width, depth))


def _built(one: Workload, width: int, depth: int) -> Any:
    torch.manual_seed(0)
    return one.build(width, depth)


@every_config
def test_at_its_own_size_the_network_is_the_one_diffusers_builds(name: str, files, chosen) -> None:
    assert config_size(files[name]) == chosen[name].size == OWN[name]
    with torch.device("meta"):
        theirs = getattr(diffusers, CONFIGS[name]["_class_name"]).from_config(CONFIGS[name])
    assert _at(chosen[name], OWN[name].width, OWN[name].depth) == _shapes(theirs)


@every_config
def test_twice_the_width_doubles_dimensions_or_leaves_those_of_inputs(name: str, chosen) -> None:
    own = OWN[name]
    here, wider = (_at(chosen[name], factor * own.width, own.depth) for factor in (1, 2))
    assert here.keys() == wider.keys()
    for tensor, shape in here.items():
        factors = [new / old for old, new in zip(shape, wider[tensor], strict=True)]
        assert {*factors} <= {1.0, 2.0}, tensor
        # What stays has the size of an input, of the outputs, of a head or of a kernel.
        kept = [old for old, factor in zip(shape, factors, strict=True) if factor == 1]
        assert {*kept} <= {1, 2, 3, 4, 5, 6, 8, 11, 12, 16, 20, 32, 36, 256}, tensor
        assert 2.0 in factors or len(shape) == 1, tensor


@pytest.mark.parametrize("name", ["dit", "pixart", "flux"])
def test_twice_the_depth_doubles_the_layers_and_leaves_their_shapes(name: str, chosen) -> None:
    own = OWN[name]
    here, deeper = (_at(chosen[name], own.width, factor * own.depth) for factor in (1, 2))
    assert {tensor: deeper[tensor] for tensor in here} == here

    def layers(shapes: dict[str, tuple[int, ...]]) -> set[tuple[str, ...]]:
        return {tuple(tensor.split(".")[:2]) for tensor in shapes if "transformer_blocks" in tensor}

    assert len(layers(deeper)) == 2 * len(layers(here)) == (12 if name == "flux" else 4)


def test_a_deeper_sd3_keeps_the_share_of_layers_that_attend_twice(chosen) -> None:
    deeper = _at(chosen["sd3"], 32, 8)
    twice = {tensor.split(".")[1] for tensor in deeper if ".attn2.to_q." in tensor}
    assert twice == {"0", "1", "2", "3"}


@pytest.mark.parametrize(("width", "depth"), [(48, 3), (144, 1)])
def test_parameters_of_dit_are_counted_by_hand(width: int, depth: int, chosen) -> None:
    """Peebles and Xie, 2023, with diffusers' table of time and labels in every block."""
    w, patch, labels = width, 2 * 2, 11
    time = 256 * w + w + w * w + w
    block = time + labels * w + 6 * w * (w + 1) + 4 * w * (w + 1) + 4 * w * (w + 1) + w * (4 * w + 1)
    found = _at(chosen["dit"], width, depth)
    counted = sum(torch.Size(shape).numel() for shape in found.values())
    assert counted == (4 * patch * w + w) + depth * block + 2 * w * (w + 1) + (w + 1) * patch * 8


def test_heads_of_u_nets_keep_their_dimension(chosen) -> None:
    for name in ("unet", "text unet"):
        heads: list[list[tuple[int, int]]] = []
        for width in (16, 32):
            with torch.device("meta"):
                model = chosen[name].build(width, 1)
            attending = [module for module in model.modules() if type(module).__name__ == "Attention"]
            heads.append([(one.heads, one.inner_dim // one.heads) for one in attending])
        assert [(2 * number, dim) for number, dim in heads[0]] == heads[1]
        assert {dim for _, dim in heads[0]} == {8}


@pytest.mark.parametrize("blocks", ["SimpleCrossAttn", "Attn"])
def test_where_attention_head_dim_is_what_it_is_called_it_stays(blocks: str, tmp_path: Path) -> None:
    values = LEVELS | {"_class_name": "UNet2DConditionModel", "attention_head_dim": 8}
    values |= {"cross_attention_dim": 20, "mid_block_type": None}
    values |= {"down_block_types": ["DownBlock2D", f"{blocks}DownBlock2D"]}
    values |= {"up_block_types": [f"{blocks}UpBlock2D", "UpBlock2D"]}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with torch.device("meta"):
        model = workload(f"diffusers:{tmp_path}").build(32, 1)
    attending = [module for module in model.modules() if type(module).__name__ == "Attention"]
    assert {(one.heads, one.inner_dim // one.heads) for one in attending} == {(8, 8)}


def test_each_transformer_of_a_u_net_is_one_branch(chosen) -> None:
    """`h + proj_out(blocks(proj_in(norm(h))))`: depth adds such branches, and no blocks inside of them."""
    one = chosen["text unet"]
    branches = {
        depth: dissect(one.build, one.batch(0, 0)[0], size=Size(16, depth)).branches for depth in (1, 2)
    }
    for depth, found in branches.items():
        with torch.device("meta"):
            modules = [type(module).__name__ for module in one.build(16, depth).modules()]
        ends = [end for branch in found for end in branch.ends if end.endswith("proj_out.weight")]
        assert len(ends) == modules.count("Transformer2DModel")
        assert len(found) - len(ends) == modules.count("ResnetBlock2D")


def _ends(one: Workload, seed: int, step: int) -> tuple[Tensor, Tensor, Tensor, Any]:
    """Data x₀ and noise x₁ on the line through x_t with the velocity, and the time, by x_t = x₀ + t v."""
    inputs, velocity = one.batch(seed, step)
    noisy = inputs.get("sample", inputs.get("hidden_states"))
    unit = 1 if "img_ids" in inputs else 1000
    time = (inputs["timestep"] / unit).view(-1, *[1] * (noisy.ndim - 1))
    return noisy - time * velocity, noisy + (1 - time) * velocity, time, inputs


@every_config
def test_latents_are_noise_around_a_pattern_of_their_class(name: str, chosen) -> None:
    """Both have unit variance, data of one class half of it in common, and noise nothing."""
    drawn = [_ends(chosen[name], 0, step) for step in range(12)]
    data, noise, time = (torch.cat([one[part] for one in drawn]).flatten(1) for part in range(3))
    conditions = [one[3].get("class_labels", one[3].get("encoder_hidden_states")) for one in drawn]
    classes = torch.cat([one.flatten(1)[:, 0] if one.ndim > 1 else one for one in conditions])
    same = (classes[:, None] == classes) & ~torch.eye(len(classes), dtype=torch.bool)
    assert 2 <= len(classes.unique()) <= 10
    assert (time >= 0).all()
    assert (time < 1).all()
    assert time.std() == pytest.approx(12**-0.5, rel=0.2)
    for latents, shared in ((data, 0.5), (noise, 0.0)):
        products = latents @ latents.T / latents.shape[1]
        assert products.diag().mean() == pytest.approx(1.0, abs=0.1)
        assert products[same].mean() == pytest.approx(shared, abs=0.05)
        other = products[~same & ~torch.eye(len(classes), dtype=torch.bool)]
        assert other.mean() == pytest.approx(0.0, abs=0.05)


@every_config
def test_batches_are_functions_of_seed_and_step(name: str, chosen) -> None:
    first, again, later, other = (chosen[name].batch(*at)[1] for at in ((0, 0), (0, 0), (0, 1), (1, 0)))
    assert torch.equal(first, again)
    assert not torch.equal(first, later)
    assert not torch.equal(first, other)


@every_config
def test_every_tensor_is_trained_without_chance(name: str, chosen) -> None:
    one = chosen[name]
    model, batch = _built(one, OWN[name].width, 1).train(), one.batch(0, 0)
    loss = one.evaluate(model, batch)
    assert torch.equal(loss, one.evaluate(model, batch))  # neither dropout nor labels that are dropped
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert 1.5 < loss < 4  # 2 is that of a prediction of 0


def test_the_loss_ignores_the_variance_of_dit(chosen) -> None:
    one = chosen["dit"]
    model, (inputs, velocity) = _built(one, 32, 1), one.batch(0, 0)
    prediction = model(**inputs).sample
    assert (prediction.shape[1], velocity.shape[1]) == (8, 4)
    prediction.retain_grad()
    loss = one.loss(prediction, velocity)
    loss.backward()
    assert loss.item() == pytest.approx((prediction[:, :4] - velocity).square().mean().item())
    assert (prediction.grad[:, 4:] == 0).all()
    assert (prediction.grad[:, :4] != 0).any()


@every_config
def test_as_a_field_a_model_has_the_loss_of_its_workload(name: str, chosen) -> None:
    """The field goes from noise to data: with the other sign and time reversed it predicts the targets."""
    one = chosen[name]
    model, (inputs, velocity) = _built(one, OWN[name].width, 1).eval(), one.batch(0, 0)
    x = inputs.pop("sample", inputs.pop("hidden_states", None))
    time = inputs.pop("timestep") / (1 if name == "flux" else 1000)
    with torch.no_grad():
        found = -flows.denoiser_field(model, **inputs)(x, 1 - time)
        expected = one.evaluate(model, one.batch(0, 0))
    torch.testing.assert_close((found - velocity).square().mean(), expected)


def test_dit_learns_the_patterns_and_not_more_than_is_known(chosen) -> None:
    """The least loss: π/2 by x_t alone, the mean of 1 / ((1 − t)² + t²); π/√8 with the class, whose latents
    have the variance ½."""
    one, model = chosen["dit"], _built(chosen["dit"], 64, 1)
    optimizer = torch.optim.Adam(model.parameters(), 0.004)
    for step in range(300):
        optimizer.zero_grad()
        one.evaluate(model, one.batch(0, step)).backward()
        optimizer.step()
    with torch.no_grad():
        losses = [one.evaluate(model, one.draw_held_out(step)).item() for step in range(8)]
    assert math.pi / math.sqrt(8) < sum(losses) / len(losses) < 0.95 * math.pi / 2


@pytest.mark.parametrize("name", ["flux", "text unet"])
def test_a_model_that_paints_into_images_predicts_its_first_channels(name: str, tmp_path: Path) -> None:
    """Its further inputs are a mask and an image."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name] | {"in_channels": 9, "out_channels": 3}))
    one = workload(f"diffusers:{tmp_path}")
    inputs, velocity = one.batch(0, 0)
    prediction = _built(one, 32, 1)(**inputs).sample
    assert prediction.shape == velocity.shape
    assert 3 in velocity.shape[1:]


def test_a_learned_time_is_a_row_of_its_table(tmp_path: Path) -> None:
    values = CONFIGS["unet"] | {"time_embedding_type": "learned", "num_train_timesteps": 40}
    (tmp_path / "config.json").write_text(json.dumps(values))
    one = workload(f"diffusers:{tmp_path}")
    times = torch.cat([one.batch(0, step)[0]["timestep"] for step in range(8)])
    assert times.dtype == torch.int64
    assert 0 <= times.min() < 8
    assert 32 <= times.max() < 40


def test_roles_of_dit_are_those_that_are_proven(chosen) -> None:
    """Zheng et al., Scaling diffusion transformers efficiently via μP, 2025 (arXiv 2505.15270)."""
    proven = {
        "pos_embed.proj": "input",
        "timestep_embedder.linear_1": "input",
        "embedding_table": "input",
        "timestep_embedder.linear_2": "hidden",
        "norm1.linear": "hidden",
        "proj_out_1": "hidden",
        "attn1.to_": "hidden",
        "ff.net.": "hidden",
        "proj_out_2": "output",
    }
    anatomy = dissect(chosen["dit"].build, chosen["dit"].batch(0, 0)[0], size=Size(32, 2))
    for tensor, part in anatomy.items():
        (role,) = (role for name, role in proven.items() if name in tensor)
        assert part.role == ("bias" if tensor.endswith("bias") else role), tensor


INPUTS = {
    "pixart": ("pos_embed.proj", "caption_projection.linear_1", "timestep_embedder.linear_1"),
    "sd3": ("pos_embed.proj", "context_embedder", "text_embedder.linear_1"),
    "flux": ("x_embedder", "context_embedder", "guidance_embedder.linear_1"),
    "unet": ("conv_in", "class_embedding"),
    "text unet": ("conv_in", "attn2.to_k", "attn2.to_v", "add_embedding.linear_1"),
}


@pytest.mark.parametrize("name", INPUTS)
def test_inputs_and_outputs_of_other_models_are_found(name: str, chosen) -> None:
    anatomy = dissect(chosen[name].build, chosen[name].batch(0, 0)[0], size=OWN[name])
    roles = {tensor: part.role for tensor, part in anatomy.items() if tensor.endswith("weight")}
    assert {*roles.values()} <= {"input", "hidden", "output", "gain"}
    for named in INPUTS[name]:
        assert {role for tensor, role in roles.items() if named in tensor} == {"input"}
    last = "conv_out.weight" if "unet" in name else "proj_out.weight"
    assert [tensor for tensor, role in roles.items() if role == "output"] == [last]
    modulating = [role for tensor, role in roles.items() if "norm" in tensor and ".linear." in tensor]
    assert {*modulating} <= {"hidden"}


@pytest.fixture
def pipeline(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "pipeline"
    (folder / "transformer").mkdir(parents=True)
    index = {"_class_name": "DiTPipeline", "transformer": ["diffusers", "DiTTransformer2DModel"]}
    (folder / "model_index.json").write_text(json.dumps(index))
    (folder / "transformer" / "config.json").write_text(json.dumps(CONFIGS["dit"]))
    return folder


def test_of_a_pipeline_the_network_is_used_and_named(pipeline: Path) -> None:
    for path in (pipeline, pipeline / "model_index.json"):
        assert workload(f"diffusers:{path}").name == "diffusers:transformer/DiTTransformer2DModel"
        assert config_size(path) == Size(32, 2)
    alone = workload(f"diffusers:{pipeline / 'transformer'}")
    assert alone.name == "diffusers:DiTTransformer2DModel"
    (pipeline / "transformer" / "config.json").rename(pipeline / "transformer" / "other.json")
    with pytest.raises(
        UseError, match=r"is a pipeline without transformer/config\.json or unet/config\.json"
    ):
        workload(f"diffusers:{pipeline}")


def test_a_run_is_recorded_with_the_config_of_its_network(pipeline: Path) -> None:
    content = (pipeline / "transformer" / "config.json").read_bytes()
    found = environment(f"diffusers:{pipeline}")["workload_source"]
    assert found == hashlib.sha256(content).hexdigest()[:16]


def test_a_config_is_planned_at_its_own_size_from_a_small_one(pipeline: Path, capsys) -> None:
    values = CONFIGS["dit"] | {"num_attention_heads": 32, "num_layers": 6}
    (pipeline / "transformer" / "config.json").write_text(json.dumps(values))
    with pytest.raises(SystemExit):
        main(["plan", f"diffusers:{pipeline}", "--lr", "0.25", "--json"])
    made = json.loads(capsys.readouterr().out)
    assert (made["size"], made["base"]) == ({"width": 256, "depth": 6}, {"width": 128, "depth": 4})
    assert made["rows"]["transformer_blocks.5.norm1.linear.weight"]["lr"] == 0.125


UNET = CONFIGS["text unet"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1], "holds a list, not the keys and values of a config"),
        ({}, "has no _class_name, so it is not a config of diffusers"),
        ({"_class_name": 3}, "has no _class_name"),
        ({"_class_name": "CogVideoXTransformer3DModel"}, r"'CogVideoXTransformer3DModel'\. Known are DiT"),
        ({"_class_name": "UNet2dModel"}, r"'UNet2dModel'\. Did you mean 'UNet2DModel'\? Known are DiT"),
        ({"_class_name": "AutoencoderKL"}, "Known are .* Write a Workload for it"),
        ({"_class_name": "os.system"}, "is of the class 'os.system'"),
        ({"_class_name": "Transformer2DModel", "in_channels": 32}, "Transformer2DModel of patches with"),
        (CONFIGS["dit"] | {"num_layers": 0}, "num_layers is 0"),
        (CONFIGS["dit"] | {"attention_head_dim": "wide"}, "attention_head_dim is 'wide'"),
        (CONFIGS["dit"] | {"num_layers": 2**20}, "num_layers is 1048576: give an integer, at least 1"),
        (CONFIGS["flux"] | {"num_single_layers": 10**9}, "num_single_layers is 1000000000"),
        (CONFIGS["unet"] | {"layers_per_block": [1, 0]}, "layers_per_block is 0"),
        (CONFIGS["dit"] | {"norm_type": "ada_norm"}, "could not build DiTTransformer2DModel at 32 × 2"),
        (CONFIGS["dit"] | {"in_channels": 10**6}, r"the shape of latents is \(1000000, 8, 8\)"),
        (CONFIGS["unet"] | {"block_out_channels": []}, "block_out_channels is None"),
        (CONFIGS["unet"] | {"time_embedding_type": "fourier"}, "a score, not a velocity"),
        (CONFIGS["unet"] | {"class_embed_type": "identity"}, "class_embed_type is 'identity', for which"),
        (CONFIGS["unet"] | {"norm_num_groups": "few"}, "is no config of UNet2DModel"),
        (UNET | {"addition_embed_type": "image"}, "addition_embed_type is 'image', for which batches cannot"),
        (UNET | {"encoder_hid_dim_type": "image_proj"}, "encoder_hid_dim_type is 'image_proj'"),
        (UNET | {"cross_attention_dim": [20, 24]}, r"cross_attention_dim is \[20, 24\]"),
        (UNET | {"mid_block_type": "UNetMidBlock2DSimpleCrossAttn"}, "a number of heads for some of Cross"),
        (CONFIGS["dit"] | {"attn_implementation": "some/kernel"}, "code to download, which is not run"),
    ],
)  # fmt: skip
def test_what_is_no_config_of_a_known_model_is_refused(values: Any, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(UseError, match=message):
        workload(f"diffusers:{tmp_path}")


def test_widths_between_heads_groups_or_thirds_are_refused(chosen) -> None:
    for name, message in (
        ("dit", r"width is 36, not a multiple of 8 \(heads have 8 dimensions.*give 32 or 40"),
        ("pixart", r"width is 36, not a multiple of 24 .*give 24 or 48"),
        ("flux", r"width is 36, not a multiple of 16 \(heads have 16 dimensions\): give 32 or 48"),
        ("unet", r"width is 36, not a multiple of 8 \(norms have 4 groups .*give 32 or 40"),
    ):
        with pytest.raises(UseError, match=message):
            chosen[name].build(36, 1)


def test_a_missing_file_and_a_missing_package_are_named(files, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UseError, match=r"nowhere\.json is not there: give diffusers: the path"):
        workload("diffusers:nowhere.json")
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(UseError, match=r"pip install 'theodolite\[diffusers\]'"):
        workload(f"diffusers:{files['dit']}")
