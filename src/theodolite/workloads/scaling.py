"""The values of a transformers config at another width and depth."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

from theodolite.core.errors import UseError
from theodolite.core.size import Size

# Sizes that go with the width, besides the config's own key for it.
_SIZES = re.compile(
    r"""(.*intermediate_size(_mlp)? | .*ffn_dim | .*ffn_hidden_size | feed_forward_size | n_inner | d_inner
    | d_ff | dff | dim_ff | hidden_dim | classifier_proj_size | word_embed_proj_dim | attention_hidden_size
    | lru_width | time_step_rank | mamba_dt_rank | mamba_d_ssm)""",
    re.VERBOSE,
)
_HEADS = re.compile(r".*heads(_per_layer)?|n_head")
_SHARED_HEADS = re.compile(r".*(key_value_heads|kv_heads|query_groups)")
# Lists of the numbers of some layers, and how many layers are of some kind.
_LAYER_INDICES = re.compile(r".*_(idxs|indices|ids|only_layers)|moe_layers|cross_attention_layers")
_LAYER_COUNTS = re.compile(r"first_k_dense_replace|num_dense_layers|num_kv_shared_layers|max_window_layers")


def size_of(config: Any) -> Size:
    """The size of a config: its hidden size and number of layers.

    Of a network in stages the width of the first stage, and the number of blocks in the shortest. What is
    missing is the text of a UseError.
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
    """The config's values at another width and depth, by its own names for them.

    Sizes and numbers of heads go in proportion, lists with an item for each layer are repeated or stretched,
    the rest stays.
    """
    values: dict[str, Any] = config.to_dict()
    for key in ("quantization_config", "out_features", "out_indices", "stage_names"):  # of the own depth
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
        elif isinstance(value, bool) or not isinstance(value, int):
            continue
        elif _SHARED_HEADS.fullmatch(key) and heads:
            values[key] = share_heads(value, heads, _proportion(heads, grown))
        elif _SIZES.fullmatch(key) or _HEADS.fullmatch(key):
            values[key] = _proportion(value, grown)
        elif key.startswith("embedding_") and value == config.hidden_size:
            values[key] = width
        elif _LAYER_COUNTS.fullmatch(key):
            values[key] = _proportion(value, Fraction(depth, layers)) if value else 0

    values[names.get("hidden_size", "hidden_size")] = width
    for key in (names.get("num_hidden_layers", "num_hidden_layers"), "decoder_layers", "num_decoder_layers"):
        if isinstance(values.get(key), int):
            values[key] = _proportion(values[key], Fraction(depth, layers))
    if "attention_types" in values:  # GPT-Neo's way of writing attention_layers
        values["attention_types"] = [[values["attention_layers"], 1]]
    values["use_cache"] = False
    return values


def _scale_stages(values: dict[str, Any], own: Size, width: int, depth: int) -> dict[str, Any]:
    """The values of a network in stages, with the widths, heads and depths of all stages in proportion."""
    stages = len(values["depths"])
    for key, value in values.items():
        if key in ("embed_dim", "embedding_size"):
            values[key] = _proportion(value, Fraction(width, own.width))
        elif key == "depths":
            values[key] = [_proportion(one, Fraction(depth, own.depth)) for one in value]
        elif not (isinstance(value, (list, tuple)) and len(value) == stages):
            continue
        elif key == "hidden_sizes" or _HEADS.fullmatch(key):
            values[key] = [_proportion(one, Fraction(width, own.width)) for one in value]
    return values


def share_heads(shared: int, heads: int, new_heads: int) -> int:
    """Key/value heads for another number of heads: in proportion, or the next lower divisor; one stays one.

    >>> [share_heads(8, heads=32, new_heads=new) for new in (4, 8, 12, 64)]
    [1, 2, 3, 16]
    >>> share_heads(2, heads=8, new_heads=6), share_heads(1, heads=8, new_heads=16)
    (1, 1)
    """
    if shared == 1:
        return 1
    largest = max(1, new_heads * shared // heads)
    return next(count for count in range(largest, 0, -1) if new_heads % count == 0)


def adapt(items: list[Any], depth: int) -> list[Any]:
    """A list with an item for each layer, for another number of layers.

    A pattern that repeats goes on repeating. Anything else is stretched, so that its ends stay its ends.

    >>> adapt(["local", "local", "global"] * 2, 9) == ["local", "local", "global"] * 3
    True
    >>> adapt(["dense", "sparse", "sparse", "sparse", "sparse", "sparse"], 3)
    ['dense', 'sparse', 'sparse']
    >>> adapt(["local", "local", "local", "global"] * 3, 2)
    ['local', 'global']
    """
    for period in range(1, len(items) // 2 + 1):
        if all(item == items[i % period] for i, item in enumerate(items)):
            if depth >= period:
                return [items[i % period] for i in range(depth)]
            items = items[:period]
            break
    if depth == 1:
        return items[-1:]
    return [items[round(i * (len(items) - 1) / (depth - 1))] for i in range(depth)]


def _scale_list(key: str, items: list[Any], grown: Fraction, layers: int, depth: int) -> list[Any]:
    if _LAYER_INDICES.fullmatch(key):
        chosen = adapt([layer in items for layer in range(layers)], depth)
        return [layer for layer, is_chosen in enumerate(chosen) if is_chosen]
    if key == "conv_dim":  # of the layers that read a wave
        return [_proportion(item, grown) for item in items]
    if len(items) != layers or "token" in key or key.startswith(("conv_", "tdnn_")):
        return items
    if _SIZES.fullmatch(key) or _HEADS.fullmatch(key):
        items = [_proportion(item, grown) for item in items]
    return adapt(items, depth)


def _proportion(value: int, ratio: Fraction) -> int:
    return max(1, round(value * ratio))
