"""What models of diffusers are trained for here: the velocity of noisy latents, with synthetic batches."""

# B batch, C channels, H height, W width, T tokens, D size of a token of text

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import mse_loss

from theodolite.core.batches import Batch
from theodolite.core.errors import UseError
from theodolite.data.batches import generator
from theodolite.flows.fields import timestep

NUM_EXAMPLES, SIDE, TOKENS = 8, 16, 12
"""Latents in a batch, about the most pixels along a side, and tokens of text."""
CLASSES = 10
"""Patterns of latents, where a config does not number its classes."""
LARGEST = 2**22
"""The most numbers in one latent or text: more are a mistake, and would use up all memory."""

Values = Mapping[str, Any]
"""The keys and values of a config."""


def first_channels_loss(prediction: Tensor, velocity: Tensor) -> Tensor:
    """The mean squared error of a velocity.

    A model that predicts more channels than have a target, as DiT does for its variance, is judged by the
    first of them.

    >>> first_channels_loss(torch.ones(2, 8, 4, 4), torch.zeros(2, 4, 4, 4))
    tensor(1.)
    """
    return mse_loss(prediction[tuple(slice(length) for length in velocity.shape)], velocity)


def side_of(values: Values) -> int:
    """Pixels along a side of the latents: about 16, in whole patches or halved by every level of a U-Net.

    >>> side_of({"sample_size": 32, "patch_size": 2}), side_of({"sample_size": 8, "patch_size": 2})
    (16, 8)
    >>> side_of({"block_out_channels": [32] * 6})
    32
    """
    own = values.get("sample_size") or SIDE
    unit = values.get("patch_size") or 2 ** (len(values.get("block_out_channels") or [0]) - 1)
    return int(max(min(own if isinstance(own, int) else min(own), SIDE) // unit, 1) * unit)


def draw_latents(kind: str, values: Values, seed: int, step: int) -> Batch:
    """Noisy latents with what the model takes beside them, and their velocities.

    Latents x₀ are noise around a pattern for each class. With other noise x₁ and a time t, uniform in [0, 1),
    the input is `(1 − t) x₀ + t x₁` and the target `x₁ − x₀` (flow matching along straight lines). So t = 0
    is data and t = 1 noise, the reverse of `theodolite.flows`: `flows.denoiser_field` makes a field of a
    model. Every class has a text of its own, which is noise too.

    Args:
        kind: the class of the model.
        values: its config, complete.
        seed: of the run.
        step: the batch's number.
    """
    random = generator("diffusers", seed, step)
    labels = random.integers(_num_classes(kind, values), size=NUM_EXAMPLES).tolist()
    time_B = torch.from_numpy(random.random(NUM_EXAMPLES, dtype=np.float32))
    is_packed = kind == "FluxTransformer2DModel"  # patches of latents in a row
    shape = _shape(values, is_packed)
    patterns = _per_class("latents", labels, *shape)
    around, noise = (torch.from_numpy(random.standard_normal((2, NUM_EXAMPLES, *shape), np.float32))).unbind()
    data = (patterns + around) / math.sqrt(2)
    time = time_B.view(-1, *[1] * len(shape))
    noisy, velocity = (1 - time) * data + time * noise, noise - data

    channels = min(values["in_channels"], values.get("out_channels") or values["in_channels"])
    target = velocity[..., :channels] if is_packed else velocity[:, :channels]
    name = "sample" if kind.startswith("UNet") else "hidden_states"
    conditions = _CONDITIONS[kind](values, labels)
    return {name: noisy, "timestep": timestep(kind, values, time_B), **conditions}, target.contiguous()


def _shape(values: Values, is_packed: bool) -> tuple[int, ...]:
    side, channels = side_of(values), values["in_channels"]
    return ((side // 2) ** 2, channels) if is_packed else (channels, side, side)


def _num_classes(kind: str, values: Values) -> int:
    key = "num_embeds_ada_norm" if kind == "DiTTransformer2DModel" else "num_class_embeds"
    return values.get(key) or CLASSES


def _labelled(values: Values, labels: list[int]) -> dict[str, Any]:
    return {"class_labels": torch.tensor(labels)}


def _captioned(values: Values, labels: list[int]) -> dict[str, Any]:
    """PixArt: a text and, for models of 1024 pixels, the size of the image."""
    found: dict[str, Any] = {}
    if size := values["caption_channels"] or values["cross_attention_dim"]:
        found["encoder_hidden_states"] = _per_class("text", labels, TOKENS, size)
    if values["use_additional_conditions"]:
        found["added_cond_kwargs"] = {
            "resolution": torch.full((len(labels), 2), 1024.0),
            "aspect_ratio": torch.ones(len(labels), 1),
        }
    return found


def _pooled(values: Values, labels: list[int]) -> dict[str, Any]:
    """SD3: a text, and one vector for all of it."""
    return {
        "encoder_hidden_states": _per_class("text", labels, TOKENS, values["joint_attention_dim"]),
        "pooled_projections": _per_class("pooled", labels, values["pooled_projection_dim"]),
    }


def _positioned(values: Values, labels: list[int]) -> dict[str, Any]:
    """Flux: the same, with the positions of all tokens, and the strength of guidance."""
    side = side_of(values) // 2
    rows, columns = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    places = torch.stack((torch.zeros_like(rows), rows, columns), -1).flatten(0, 1).float()
    found = _pooled(values, labels) | {"txt_ids": torch.zeros(TOKENS, 3), "img_ids": places}
    return found | ({"guidance": torch.ones(len(labels))} if values["guidance_embeds"] else {})


def _in_classes(values: Values, labels: list[int]) -> dict[str, Any]:
    """A U-Net: the class, if the config has classes."""
    kind = values["class_embed_type"]
    if kind is None:
        return _labelled(values, labels) if values["num_class_embeds"] is not None else {}
    if kind == "timestep":
        return {"class_labels": torch.tensor(labels).float()}
    if kind in ("projection", "simple_projection"):
        return {"class_labels": _per_class("class", labels, values["projection_class_embeddings_input_dim"])}
    raise UseError(f"class_embed_type is {kind!r}, {_NO_BATCH}")


def _with_text(values: Values, labels: list[int]) -> dict[str, Any]:
    """A U-Net: a text, the class, and SDXL's pooled text and sizes of the image."""
    for key, known in (("encoder_hid_dim_type", "text_proj"), ("addition_embed_type", ("text", "text_time"))):
        if values[key] is not None and values[key] not in known:
            raise UseError(f"{key} is {values[key]!r}, {_NO_BATCH}")
    text = _per_class("text", labels, TOKENS, _text_size(values))
    found = {"encoder_hidden_states": text, **_in_classes(values, labels)}
    if values["addition_embed_type"] == "text_time":
        sizes = 6  # height and width before and after cropping, and two offsets
        pooled = values["projection_class_embeddings_input_dim"] - sizes * values["addition_time_embed_dim"]
        found["added_cond_kwargs"] = {
            "text_embeds": _per_class("pooled", labels, pooled),
            "time_ids": torch.tensor([1024.0, 1024, 0, 0, 1024, 1024]).repeat(len(labels), 1),
        }
    return found


def _text_size(values: Values) -> int:
    size = values["encoder_hid_dim"] or values["cross_attention_dim"]
    sizes = set(size) if isinstance(size, (list, tuple)) else {size}
    if len(sizes) != 1 or not isinstance(only := sizes.pop(), int):
        raise UseError(f"cross_attention_dim is {size!r}, {_NO_BATCH}")
    return only


def _per_class(what: str, labels: list[int], *shape: int) -> Tensor:
    """Noise that depends on the class alone."""
    if math.prod(shape) > LARGEST:
        raise UseError(f"by its config, the shape of {what} is {shape}: at most {LARGEST} numbers are drawn")
    rows = [generator("diffusers", what, label).standard_normal(shape, np.float32) for label in labels]
    return torch.from_numpy(np.stack(rows))


_NO_BATCH = "for which batches cannot be made. Write a Workload for it"
_CONDITIONS = {
    "DiTTransformer2DModel": _labelled,
    "PixArtTransformer2DModel": _captioned,
    "SD3Transformer2DModel": _pooled,
    "FluxTransformer2DModel": _positioned,
    "UNet2DModel": _in_classes,
    "UNet2DConditionModel": _with_text,
}
"""What each model takes beside latents and time."""
