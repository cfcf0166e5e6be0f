"""Any causal language model of transformers as a workload, from its config file alone."""

# B batch, T tokens

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from theodolite import data
from theodolite.building import in_one_line
from theodolite.errors import UseError
from theodolite.models.options import require_multiple
from theodolite.size import Size
from theodolite.workloads.builtin import next_token_loss
from theodolite.workloads.definition import Batch, Workload
from theodolite.workloads.scaling import scale_values
from theodolite.writing import read_json

NUM_SEQUENCES, LENGTH = 4, 64
# A default network is about this large, and never larger than the config's own.
SMALL = Size(128, 4)


def hugging_face(path: str | Path) -> Workload:
    """The workload of a causal language model's `config.json`, or of the folder that has one.

    `build(width, depth)` scales the config: hidden and intermediate sizes, and the numbers of heads, in
    proportion to width with the dimension of a head as it is; layers, and lists with an item for each layer,
    to depth. Everything else, such as the vocabulary and the number of experts, is the config's own.
    Nothing is downloaded and no code of the config's is run. Weights are initialised by transformers,
    in float32, from torch's global generator.

    Batches are the bytes of the State of the Union, modulo the vocabulary where that is below 256. The
    default size is a small one that keeps all proportions; `config_size` has the config's own.

    Needs `transformers`, which `pip install 'theodolite[hf]'` brings.
    """
    config = _config(path)
    width, group = _head_width(config), _heads_per_group(config)
    natural = width * group
    size = Size(
        min(natural * math.ceil(SMALL.width / natural), config.hidden_size),
        min(SMALL.depth, config.num_hidden_layers),
    )
    _require_growth(path, config, size)
    length = min(LENGTH, getattr(config, "max_position_embeddings", None) or LENGTH)
    return Workload(
        f"hf:{config.model_type}",
        partial(_build, str(path)),
        partial(_batch, config.vocab_size, length),
        next_token_loss,
        size,
    )


def config_size(path: str | Path) -> Size:
    """The size a config itself has."""
    config = _config(path)
    return Size(config.hidden_size, config.num_hidden_layers)


def read_config(path: str | Path) -> dict[str, Any]:
    """The keys and values of a `config.json`, or of the folder that has one.

    A config that names code to download is refused.
    """
    path = Path(path).expanduser()
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise UseError(
            f"{file} is not there: give hf: the path of a config.json on disk, nothing is downloaded"
        )
    values = read_json(file)
    if not isinstance(values, dict):
        raise UseError(f"{file} holds a {type(values).__name__}, not the keys and values of a config")
    for config in (values, *(value for value in values.values() if isinstance(value, dict))):
        for key, named in config.items():
            # transformers downloads a kernel that is named like a repository, and runs it.
            if key.endswith("_implementation") and "/" in str(named):
                raise UseError(
                    f"{file}: {key} is {named!r}, code to download, which is not run. Remove {key} from it"
                )
    return values


def _build(path: str, width: int, depth: int) -> nn.Module:
    transformers = _transformers()
    Size(width, depth)
    config = _config(path)
    unit = _head_width(config)
    require_multiple("width", width, unit, f"{config.model_type} has one head for each {unit} of its width")
    values = scale_values(config, width, depth)
    # Eager attention and experts are plain operations, which can be differentiated twice, forward and
    # backward; fused ones cannot. But which experts eager code runs depends on values, and on the meta device
    # there are none: there transformers may choose, which is grouped_mm for a model that has experts.
    hollow = torch.get_default_device().type == "meta"
    try:
        return transformers.AutoModelForCausalLM.from_config(
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


def _require_growth(path: str | Path, config: Any, size: Size) -> None:
    """Refuse a model that stays as it is when its config is scaled; no memory is taken for the weights."""

    def parameters(width: int, depth: int) -> int:
        with torch.device("meta"):
            return sum(parameter.numel() for parameter in _build(str(path), width, depth).parameters())

    here = parameters(size.width, size.depth)
    for what, larger in (("wide", (2 * size.width, size.depth)), ("deep", (size.width, 2 * size.depth))):
        if parameters(*larger) <= here:
            raise UseError(
                f"{path}: {config.model_type} at {Size(*larger)} has no more parameters than at {size}, so "
                f"its config does not say by hidden_size and num_hidden_layers how {what} it is. "
                "Write a Workload for it"
            )


def _batch(vocab: int, length: int, seed: int, step: int) -> Batch:
    text = data.state_of_the_union()
    tokens_BT, targets_BT = data.draw_text(text, num=NUM_SEQUENCES, length=length, seed=seed, step=step)
    return tokens_BT % vocab, targets_BT % vocab


def _config(path: str | Path) -> Any:
    """The config of the language model, made by transformers from the file."""
    transformers = _transformers()
    values = read_config(path)
    values.pop("theodolite", None)  # about weights that were saved with it
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
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING or "text_config" in config.sub_configs:
        # Of a model that also sees or hears, the part that reads.
        config = config.get_text_config(decoder=True)
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UseError(f"{path}: transformers has no causal language model for {kind!r}")
    for name in ("hidden_size", "num_hidden_layers", "vocab_size"):
        if not isinstance(getattr(config, name, None), int):
            raise UseError(f"{path}: {kind!r} has no {name}, so its width and depth cannot be told")
    return config


def _head_width(config: Any) -> int:
    """By how much the width grows for one more head; not the head's dimension where the config gives that."""
    heads = _num_heads(config)
    return int(config.hidden_size) // math.gcd(config.hidden_size, heads) if heads else 1


def _heads_per_group(config: Any) -> int:
    """Heads that share a key/value head: widths of whole groups keep all proportions."""
    heads, shared = _num_heads(config), getattr(config, "num_key_value_heads", None)
    return heads // shared if heads and shared and shared > 1 and heads % shared == 0 else 1


def _num_heads(config: Any) -> int | None:
    for name in ("num_attention_heads", "num_heads"):
        if isinstance(heads := getattr(config, name, None), int):
            return heads
    return None


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise UseError("hf: needs the package transformers: pip install 'theodolite[hf]'") from None
    return transformers
