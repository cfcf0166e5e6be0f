"""Models of transformers as workloads, built from a config file at any width and depth."""

from __future__ import annotations

import math
import re
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from theodolite.core.arguments import is_whole, multiple
from theodolite.core.building import in_one_line
from theodolite.core.errors import UseError
from theodolite.core.optional import needed
from theodolite.core.size import Size
from theodolite.workloads.configs import (
    adapt,
    adapt_indices,
    proportion,
    read_config,
    require_growth,
    small_size,
)
from theodolite.workloads.definition import Workload
from theodolite.workloads.tasks import TASKS, Task, find_task, shortened

# Keys of a config whose values are proportional to the width, besides the hidden size.
_SIZES = re.compile(
    r"""(.*intermediate_size(_mlp)? | .*ffn_dim | .*ffn_hidden_size | feed_forward_size | n_inner | d_inner
    | d_ff | dff | dim_ff | hidden_dim | classifier_proj_size | word_embed_proj_dim | attention_hidden_size
    | lru_width | time_step_rank | mamba_dt_rank | mamba_d_ssm)""",
    re.VERBOSE,
)
_HEADS = re.compile(r".*heads(_per_layer)?|n_head")
_SHARED_HEADS = re.compile(r".*(key_value_heads|kv_heads|query_groups)")
# Keys of lists of layer indices, and of numbers of layers of some kind.
_LAYER_INDICES = re.compile(r".*_(idxs|indices|ids|only_layers)|moe_layers|cross_attention_layers")
_LAYER_COUNTS = re.compile(r"first_k_dense_replace|num_dense_layers|num_kv_shared_layers|max_window_layers")


def hugging_face(path: str | Path) -> Workload:
    """The workload of a `config.json` of transformers, or of a folder with one.

    The config's `architectures` determine the task: a causal, masked or encoder–decoder language model, a
    classifier of texts, tokens, images or sounds, or speech recognition (CTC, or like Whisper). Without them
    it is the usual task of such models. Of a multimodal model, the text part is used.

    `build(width, depth)` scales the config: hidden and intermediate sizes and the numbers of heads in
    proportion to width, with a fixed head dimension; layers, and lists with an item for each layer, in
    proportion to depth. For a network in stages (ConvNeXt, Swin), the width is that of the first stage and
    the depth the number of blocks in the shortest; the others keep their proportions. Everything else, such
    as the vocabulary and the number of experts, stays, except that images are at most about 64 pixels wide,
    clips of speech have at most 64 positions, and no layer is dropped at random.
    Nothing is downloaded, and no code that a config names is run. Weights are initialised by transformers, in
    float32, from torch's global generator.

    Texts are the bytes of the State of the Union, modulo the vocabulary if that is below 256; images and
    sounds are noise around a pattern for each class, speech is noise. The default size is a small one that
    keeps all proportions; `config_size` gives the config's own.

    Needs the package `transformers`: `pip install 'theodolite[hf]'`.
    """
    config, task = _config(path)
    build = partial(_build, str(path))
    size = small_size(size_of(config), unit=_head_width(config) * _heads_per_group(config))
    require_growth(path, config.model_type, build, size, ("hidden_size", "num_hidden_layers"))
    return Workload(
        f"hf:{config.model_type}",
        build,
        partial(task.draw, type(config).from_dict(shortened(config.to_dict()))),
        task.loss,
        size,
    )


def config_size(path: str | Path) -> Size:
    """The size of a config's own model."""
    return size_of(_config(path)[0])


def _build(path: str, width: int, depth: int) -> nn.Module:
    transformers = needed("transformers", "hf")
    Size(width, depth)
    config, task = _config(path)
    unit = _head_width(config)
    multiple("width", width, unit, f"{config.model_type} has one head for each {unit} of its width")
    values = shortened(scale_values(config, width, depth))
    if task is TASKS["next token"] and "is_decoder" in values:
        values |= {"is_decoder": True, "is_encoder_decoder": False}  # needed for BERT and similar models
    if task is TASKS["text"] and values.get("pad_token_id") is None:
        values["pad_token_id"] = 0  # a decoder classifies the last token that is not padding
    # Eager attention and experts are plain operations, which can be differentiated twice, forward and
    # backward; fused ones cannot. But eager experts depend on values, which the meta device does not have:
    # there transformers chooses, which is grouped_mm for a model that has experts.
    hollow = torch.get_default_device().type == "meta"
    try:
        return getattr(transformers, f"AutoModelFor{task.auto}").from_config(
            type(config).from_dict(values),
            dtype=torch.float32,
            attn_implementation="eager",
            experts_implementation=None if hollow else "eager",
            trust_remote_code=False,
        )
    except Exception as error:
        raise UseError(
            f"{path}: transformers could not build {config.model_type} at {Size(width, depth)}: "
            f"{in_one_line(error)}"
        ) from error


def _config(path: str | Path) -> tuple[Any, Task]:
    """The config, made by transformers from the file, and the task of its model."""
    transformers = needed("transformers", "hf")
    values = read_config(path)
    values.pop("theodolite", None)  # describes weights that were saved with it
    kind = values.get("model_type")
    if not isinstance(kind, str):
        raise UseError(f"{path} has no model_type, so it is not a config of transformers")
    if kind not in transformers.CONFIG_MAPPING:
        raise UseError(
            f"{path} is of the model_type {kind!r}, which transformers {transformers.__version__} does not "
            "have (code that comes with a config is not run)"
        )
    try:
        config = transformers.CONFIG_MAPPING[kind].from_dict(values)
    except Exception as error:
        raise UseError(f"{path} was refused by transformers: {in_one_line(error)}") from error
    if "text_config" in config.sub_configs:  # a multimodal model
        config = config.get_text_config(decoder=True)
    task = find_task(transformers, config)
    if task is None:
        raise UseError(
            f"{path}: for {kind!r} transformers has no language model, classifier or recogniser of speech. "
            "Write a Workload for it"
        )
    try:
        size_of(config)
    except UseError as error:
        raise UseError(f"{path}: {kind!r} has {error}, so its width and depth are unknown") from None
    return config, task


def _head_width(config: Any) -> int:
    """The width for each head; it may differ from the head dimension that the config gives."""
    heads, width = _num_heads(config), size_of(config).width
    return width // math.gcd(width, heads) if heads else 1


def _heads_per_group(config: Any) -> int:
    """Heads that share a key/value head; widths of whole groups keep all proportions."""
    heads, shared = _num_heads(config), getattr(config, "num_key_value_heads", None)
    return heads // shared if heads and shared and shared > 1 and heads % shared == 0 else 1


def _num_heads(config: Any) -> int | None:
    for name in ("num_attention_heads", "num_heads"):
        heads = getattr(config, name, None)
        if isinstance(heads, (list, tuple)) and heads:  # one number for each stage
            heads = heads[0]
        if isinstance(heads, int):
            return heads
    return None


def size_of(config: Any) -> Size:
    """The hidden size and number of layers of a config; the error names what is missing.

    For a network in stages, the width of the first stage and the number of blocks in the shortest.
    """
    if depths := getattr(config, "depths", None):
        widths = getattr(config, "hidden_sizes", None) or [getattr(config, "embed_dim", None)]
        if not isinstance(widths[0], int):
            raise UseError("no hidden_sizes")
        return Size(widths[0], min(depths))
    for name in ("hidden_size", "num_hidden_layers"):
        if not isinstance(getattr(config, name, None), int):
            raise UseError(f"no {name}")
    return Size(config.hidden_size, config.num_hidden_layers)


def scale_values(config: Any, width: int, depth: int) -> dict[str, Any]:
    """The config's values at another width and depth.

    Sizes and numbers of heads are scaled in proportion, lists with an item for each layer are repeated or
    stretched, the rest stays.
    """
    values: dict[str, Any] = config.to_dict()
    for key in ("quantization_config", "out_features", "out_indices", "stage_names"):  # for its own depth
        values.pop(key, None)
    if values.get("depths"):
        return _scale_stages(values, size_of(config), width, depth)
    names = config.attribute_map
    own = size_of(config)
    layers, grown = own.depth, Fraction(width, own.width)
    heads_key = names.get("num_attention_heads", "num_attention_heads")
    heads = values.get(heads_key, values.get("num_heads"))

    for key, value in values.items():
        if isinstance(value, list):
            values[key] = _scale_list(key, value, grown, layers, depth)
        elif not is_whole(value):
            continue
        elif _SHARED_HEADS.fullmatch(key) and heads:
            values[key] = share_heads(value, heads, proportion(heads, grown))
        elif _SIZES.fullmatch(key) or _HEADS.fullmatch(key):
            values[key] = proportion(value, grown)
        elif key.startswith("embedding_") and value == config.hidden_size:
            values[key] = width
        elif _LAYER_COUNTS.fullmatch(key):
            values[key] = proportion(value, Fraction(depth, layers)) if value else 0

    values[names.get("hidden_size", "hidden_size")] = width
    for key in (names.get("num_hidden_layers", "num_hidden_layers"), "decoder_layers", "num_decoder_layers"):
        if isinstance(values.get(key), int):
            values[key] = proportion(values[key], Fraction(depth, layers))
    if "attention_types" in values:  # GPT-Neo's notation of attention_layers
        values["attention_types"] = [[values["attention_layers"], 1]]
    values["use_cache"] = False
    return values


def _scale_stages(values: dict[str, Any], own: Size, width: int, depth: int) -> dict[str, Any]:
    """The values of a network in stages, with the widths, heads and depths of all stages scaled."""
    stages = len(values["depths"])
    for key, value in values.items():
        if key in ("embed_dim", "embedding_size"):
            values[key] = proportion(value, Fraction(width, own.width))
        elif key == "depths":
            values[key] = [proportion(one, Fraction(depth, own.depth)) for one in value]
        elif not (isinstance(value, (list, tuple)) and len(value) == stages):
            continue
        elif key == "hidden_sizes" or _HEADS.fullmatch(key):
            values[key] = [proportion(one, Fraction(width, own.width)) for one in value]
    return values


def share_heads(shared: int, heads: int, new_heads: int) -> int:
    """Key/value heads for another number of heads: in proportion, or the next lower divisor; 1 stays 1.

    >>> [share_heads(8, heads=32, new_heads=new) for new in (4, 8, 12, 64)]
    [1, 2, 3, 16]
    >>> share_heads(2, heads=8, new_heads=6), share_heads(1, heads=8, new_heads=16)
    (1, 1)
    """
    if shared == 1:
        return 1
    largest = max(1, new_heads * shared // heads)
    return next(count for count in range(largest, 0, -1) if new_heads % count == 0)


def _scale_list(key: str, items: list[Any], grown: Fraction, layers: int, depth: int) -> list[Any]:
    if _LAYER_INDICES.fullmatch(key):
        return adapt_indices(items, layers, depth)
    if key == "conv_dim":  # of the layers that read the wave
        return [proportion(item, grown) for item in items]
    if len(items) != layers or "token" in key or key.startswith(("conv_", "tdnn_")):
        return items
    if _SIZES.fullmatch(key) or _HEADS.fullmatch(key):
        items = [proportion(item, grown) for item in items]
    return adapt(items, depth)
