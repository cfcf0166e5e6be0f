"""Models of diffusers as workloads, built from a config file at any width and depth."""

from __future__ import annotations

import inspect
import math
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils._pytree import tree_leaves

from theodolite.core.arguments import did_you_mean, multiple, whole
from theodolite.core.building import in_one_line
from theodolite.core.errors import UseError
from theodolite.core.optional import needed
from theodolite.core.size import LARGEST, Size
from theodolite.workloads.configs import (
    SMALL,
    adapt_indices,
    proportion,
    read_config,
    require_growth,
    small_size,
)
from theodolite.workloads.definition import Workload
from theodolite.workloads.denoising import draw_latents, first_channels_loss, side_of

PREFIX = "diffusers:"
TRANSFORMERS = (
    "DiTTransformer2DModel",
    "PixArtTransformer2DModel",
    "SD3Transformer2DModel",
    "FluxTransformer2DModel",
)
UNETS = ("UNet2DModel", "UNet2DConditionModel")
SMALL_UNET = Size(32, 2)
"""About the default size of a U-Net, whose last level may be several times as wide as the first."""
PARTS = ("transformer", "unet")
"""Folders of a pipeline with the network that is trained."""

# Transformer2DModel was the class of DiT and PixArt before they had their own.
_OLD_CLASS = "Transformer2DModel"
_SUCCESSORS = {"ada_norm_zero": "DiTTransformer2DModel", "ada_norm_single": "PixArtTransformer2DModel"}
# Blocks of a conditional U-Net that take attention_head_dim for the number of heads.
_COUNT_HEADS = ("CrossAttnDownBlock2D", "UNetMidBlock2DCrossAttn", "CrossAttnUpBlock2D")

# Width and depth by their keys.
_KEYS_OF_TRANSFORMERS = ("num_attention_heads", "num_layers")
_KEYS_OF_UNETS = ("block_out_channels", "layers_per_block")

Values = dict[str, Any]


def diffusers_config(path: str | Path) -> Workload:
    """The workload of a `config.json` of diffusers, of a folder with one, or of the folder of a pipeline.

    Known are DiT, PixArt, SD3 and Flux, and U-Nets with and without text (`DiTTransformer2DModel`,
    `PixArtTransformer2DModel`, `SD3Transformer2DModel`, `FluxTransformer2DModel`, `UNet2DModel`,
    `UNet2DConditionModel`; `Transformer2DModel` if it is a DiT or a PixArt). Of a pipeline, `transformer/` or
    `unet/` is used, and the workload's name says which.

    `build(width, depth)` scales the config:

    - In a transformer, width is the number of heads times `attention_head_dim`, which is fixed, and depth is
      `num_layers`. Flux's `num_single_layers` keep their proportion.
    - In a U-Net, width is the first of `block_out_channels`, depth the smallest of `layers_per_block`, and
      all levels keep their proportions. Heads keep their dimension, groups of norms their number. (If
      `attention_head_dim` is None, the config has one head, as wide as its level.)
    - Keys that have to equal the width follow it (`caption_projection_dim`, and `cross_attention_dim` where a
      projection of captions has that size). Sizes of inputs, such as those of texts, stay.

    Latents are about 16 pixels wide. Nothing is random in training: `dropout` is 0, and so is the fraction of
    labels that DiT drops, which its config does not have; the table of labels keeps its additional row.
    Nothing is downloaded, and no code that a config names is run. Weights are initialised by diffusers, in
    float32, from torch's global generator.

    Batches are noisy latents, targets are their velocities, and the loss is the mean squared error
    (`denoising.draw_latents`). Where a model predicts more channels than it is given, such as DiT's variance,
    the loss ignores the others. The default size is a small one that keeps all proportions; `config_size`
    gives the config's own.

    Needs the package `diffusers`: `pip install 'theodolite[diffusers]'`.
    """
    kind, values = _config(path)
    file = find_file(path)
    build = partial(_build, str(path))
    try:
        unit, _ = _unit(kind, values)
        size = small_size(size_of(values), unit, SMALL_UNET if kind in UNETS else SMALL)
        draw = partial(draw_latents, kind, _shortened(values))
        draw(0, 0)
    except UseError as error:
        raise UseError(f"{file}: {error}") from None
    except Exception as error:
        raise UseError(f"{file} is no config of {kind}: {in_one_line(error)}") from error
    require_growth(file, kind, build, size, _KEYS_OF_UNETS if kind in UNETS else _KEYS_OF_TRANSFORMERS)
    part = f"{file.parent.name}/" if file.parent != _folder(path) else ""
    return Workload(f"{PREFIX}{part}{kind}", build, draw, first_channels_loss, size)


def config_size(path: str | Path) -> Size:
    """The size of a config's own model."""
    return size_of(_config(path)[1])


def find_file(path: str | Path) -> Path:
    """The `config.json` that is meant by a file, a folder, or the folder of a pipeline."""
    path = Path(path).expanduser()
    is_index = path.name == "model_index.json"
    if not path.is_dir() and not is_index:
        return path
    folder = _folder(path)
    if (folder / "config.json").is_file() and not is_index:
        return folder / "config.json"
    if (folder / "model_index.json").is_file():
        for part in PARTS:
            if (folder / part / "config.json").is_file():
                return folder / part / "config.json"
        raise UseError(
            f"{folder} is a pipeline without {' or '.join(f'{part}/config.json' for part in PARTS)}. Give "
            f"{PREFIX} the config.json of the network that is trained"
        )
    return folder / "config.json"


def _folder(path: str | Path) -> Path:
    path = Path(path).expanduser()
    return path if path.is_dir() else path.parent


def _build(path: str, width: int, depth: int) -> nn.Module:
    diffusers = needed("diffusers", "diffusers")
    size = Size(width, depth)
    kind, values = _config(path)
    multiple("width", width, *_unit(kind, values))
    try:
        model: nn.Module = _class(kind)(**_shortened(_scaled(kind, values, size)))
    except Exception as error:
        raise UseError(f"{path}: diffusers could not build {kind} at {size}: {in_one_line(error)}") from error
    for module in model.modules():
        if isinstance(module, diffusers.models.embeddings.LabelEmbedding):
            module.dropout_prob = 0.0
    return model


def _config(path: str | Path) -> tuple[str, Values]:
    """The class of the model, and its config with the defaults of diffusers for what is missing."""
    needed("diffusers", "diffusers")
    file = find_file(path)
    given = read_config(file, PREFIX)
    kind = given.get("_class_name")
    if not isinstance(kind, str):
        raise UseError(f"{file} has no _class_name, so it is not a config of diffusers")
    if kind == _OLD_CLASS and given.get("patch_size") is not None:
        kind = _SUCCESSORS.get(str(given.get("norm_type")), kind)
    known = (*TRANSFORMERS, *UNETS)
    if kind not in known:
        near = did_you_mean(kind, known, cutoff=0.85)  # most names end in Transformer2DModel
        raise UseError(
            f"{file} is of the class {kind!r}.{near} Known are {', '.join(known)}, "
            f"and {_OLD_CLASS} of patches with norm_type {' or '.join(_SUCCESSORS)}. Write a Workload for it"
        )
    signature = inspect.signature(_class(kind).__init__)
    defaults = {key: one.default for key, one in signature.parameters.items() if key != "self"}
    values = {key: given.get(key, default) for key, default in defaults.items()}
    if values.get("use_additional_conditions", False) is None:  # decided before latents are smaller
        values["use_additional_conditions"] = values["sample_size"] == 128
    try:
        _require_numbers(kind, values)
    except UseError as error:
        raise UseError(f"{file}: {error}") from None
    return kind, values


def _class(kind: str) -> Any:
    diffusers = needed("diffusers", "diffusers")
    try:
        return getattr(diffusers, kind)
    except (AttributeError, ImportError, RuntimeError) as error:  # it is imported only now
        raise UseError(f"diffusers {diffusers.__version__} has no {kind}: {in_one_line(error)}") from error


def _require_numbers(kind: str, values: Values) -> None:
    """Check the keys of which sizes are computed."""
    for key in ("in_channels", "num_attention_heads", "attention_head_dim", "patch_size"):
        if key == "in_channels" or kind in TRANSFORMERS:
            whole(key, values[key], least=1)
    for number in _listed(values.get("block_out_channels", 1)) or [None]:
        whole("block_out_channels", number, least=1)
    for key in ("num_layers", "num_single_layers", "layers_per_block", "transformer_layers_per_block"):
        for number in tree_leaves(values.get(key, 1)) or [None]:  # lists of lists, or one for all
            whole(key, number, least=int(key != "num_single_layers"), most=LARGEST["depth"])
    if values.get("time_embedding_type") == "fourier" and kind == "UNet2DModel":
        raise UseError(
            "time_embedding_type is 'fourier', so the output is divided by the timestep: it is a score, not "
            "a velocity. Write a Workload for it"
        )


def size_of(values: Values) -> Size:
    """The width and depth of a complete config.

    >>> print(size_of({"num_attention_heads": 16, "attention_head_dim": 72, "num_layers": 28}))
    1152 × 28
    >>> print(size_of({"block_out_channels": [320, 640, 1280], "layers_per_block": 2}))
    320 × 2
    """
    if "block_out_channels" in values:
        return Size(values["block_out_channels"][0], min(_listed(values["layers_per_block"])))
    return Size(values["num_attention_heads"] * values["attention_head_dim"], values["num_layers"])


def _unit(kind: str, values: Values) -> tuple[int, str]:
    """Widths are multiples of this number, and why."""
    if kind in UNETS:
        return _unit_of_unet(kind, values)
    head = values["attention_head_dim"]
    if kind == "FluxTransformer2DModel":
        return head, f"heads have {head} dimensions"
    if values.get("use_additional_conditions"):
        return math.lcm(head, 12), f"heads have {head} dimensions, and sizes of images thirds of the width"
    return math.lcm(head, 4), f"heads have {head} dimensions, and positions sines and cosines for two axes"


def _unit_of_unet(kind: str, values: Values) -> tuple[int, str]:
    widths, groups = values["block_out_channels"], values["norm_num_groups"] or 1
    heads, dims = _heads(kind, values), _per_level(values, "attention_head_dim")
    unit = 1
    for width, head in zip(widths, dims if heads is None else heads, strict=True):
        grown = Fraction(width, widths[0])
        unit = math.lcm(unit, _step(grown, math.gcd(width, groups)))
        if heads is not None:
            unit = math.lcm(unit, _step(Fraction(head, widths[0]), 1))
        elif head is not None:
            unit = math.lcm(unit, _step(grown, math.gcd(width, head)))
    return unit, f"norms have {groups} groups on every level, and heads keep their dimension"


def _step(ratio: Fraction, of: int) -> int:
    """The width of which all multiples, times the ratio, are multiples of a number.

    >>> _step(Fraction(1), 32), _step(Fraction(2), 32), _step(Fraction(3, 2), 32), _step(Fraction(8, 320), 1)
    (32, 16, 64, 40)
    """
    return ratio.denominator * of // math.gcd(ratio.numerator, ratio.denominator * of)


def _heads(kind: str, values: Values) -> list[Any] | None:
    """Heads of each level of a U-Net; None if `attention_head_dim` is what it is called."""
    if kind != "UNet2DConditionModel":
        return None
    blocks = {*values["down_block_types"], values["mid_block_type"], *values["up_block_types"]}
    attending = {str(block) for block in blocks if "Attn" in str(block)}
    if attending <= {*_COUNT_HEADS}:
        return _per_level(values, "attention_head_dim") if attending else None
    if attending & {*_COUNT_HEADS}:
        raise UseError(
            f"attention_head_dim is a number of heads for some of {', '.join(sorted(attending))} and a "
            "dimension for others. Write a Workload for it"
        )
    return None


def _scaled(kind: str, values: Values, size: Size) -> Values:
    """The config at another width and depth."""
    own = size_of(values)
    wider, deeper = Fraction(size.width, own.width), Fraction(size.depth, own.depth)
    if kind in UNETS:
        return values | _scaled_unet(kind, values, wider, deeper)
    scaled = {"num_attention_heads": size.width // values["attention_head_dim"], "num_layers": size.depth}
    if values.get("num_single_layers"):
        scaled["num_single_layers"] = proportion(values["num_single_layers"], deeper)
    if "caption_projection_dim" in values:
        scaled["caption_projection_dim"] = size.width
    if values.get("caption_channels") is not None and values["cross_attention_dim"] is not None:
        scaled["cross_attention_dim"] = size.width
    if chosen := values.get("dual_attention_layers"):
        scaled["dual_attention_layers"] = adapt_indices(chosen, own.depth, size.depth)
    return values | scaled


def _scaled_unet(kind: str, values: Values, wider: Fraction, deeper: Fraction) -> Values:
    layers = values["layers_per_block"]
    scaled: Values = {
        "block_out_channels": [proportion(width, wider) for width in values["block_out_channels"]],
        "layers_per_block": [proportion(one, deeper) for one in layers]
        if isinstance(layers, (list, tuple))
        else proportion(layers, deeper),
    }
    if heads := _heads(kind, values):
        scaled["attention_head_dim"] = [proportion(number, wider) for number in heads]
    if values["time_embedding_dim"]:
        scaled["time_embedding_dim"] = proportion(values["time_embedding_dim"], wider)
    return scaled


def _shortened(values: Values) -> Values:
    """The config with small latents and no dropout."""
    found = values | {"dropout": 0.0} if "dropout" in values else dict(values)
    side = side_of(values)
    if "sample_size" in values:
        found["sample_size"] = side
    if values.get("pos_embed_max_size"):
        found["pos_embed_max_size"] = min(values["pos_embed_max_size"], side // values["patch_size"])
    return found


def _per_level(values: Values, key: str) -> list[Any]:
    """A value for each level of a U-Net."""
    found = _listed(values[key])
    return found if len(found) > 1 else found * len(values["block_out_channels"])


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]
