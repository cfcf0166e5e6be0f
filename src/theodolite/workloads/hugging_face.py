"""Models of transformers as workloads, from their config file alone."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from theodolite.core.arguments import multiple
from theodolite.core.building import in_one_line
from theodolite.core.errors import UseError
from theodolite.core.files import read_json
from theodolite.core.size import Size
from theodolite.workloads.definition import Workload
from theodolite.workloads.scaling import scale_values, size_of
from theodolite.workloads.tasks import TASKS, Task, find_task, shortened

# A default network is about this large, and never larger than the config's own.
SMALL = Size(128, 4)


def hugging_face(path: str | Path) -> Workload:
    """The workload of a `config.json` of transformers, or of the folder that has one.

    The config's `architectures` say what is trained: a causal, masked or encoder–decoder language model, a
    classifier of texts, tokens, images or sounds, or a recogniser of speech (CTC, or as Whisper is). Without
    them it is what models of its kind usually are. Of a model that reads and sees or hears, the part that
    reads is taken.

    `build(width, depth)` scales the config: hidden and intermediate sizes, and the numbers of heads, in
    proportion to width with the dimension of a head as it is; layers, and lists with an item for each layer,
    to depth. Of a network in stages (ConvNeXt, Swin) the width is that of the first stage, and the depth the
    number of blocks in the shortest; the others keep their proportions. Everything else, such as the
    vocabulary and the number of experts, is the config's own, but that images are at most about 64 pixels
    wide, clips of speech have at most 64 positions, and no layer is left out at random.
    Nothing is downloaded and no code of the config's is run. Weights are initialised by transformers,
    in float32, from torch's global generator.

    Texts are the bytes of the State of the Union, modulo the vocabulary where that is below 256; images and
    sounds are noise around a pattern for each class, speech is noise. The default size is a small one that
    keeps all proportions; `config_size` has the config's own.

    Needs `transformers`, which `pip install 'theodolite[hf]'` brings.
    """
    config, task = _config(path)
    width, group = _head_width(config), _heads_per_group(config)
    natural, own = width * group, size_of(config)
    size = Size(min(natural * math.ceil(SMALL.width / natural), own.width), min(SMALL.depth, own.depth))
    _require_growth(path, config, size)
    return Workload(
        f"hf:{config.model_type}",
        partial(_build, str(path)),
        partial(task.draw, type(config).from_dict(shortened(config.to_dict()))),
        task.loss,
        size,
    )


def config_size(path: str | Path) -> Size:
    """The size a config itself has."""
    return size_of(_config(path)[0])


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
    config, task = _config(path)
    unit = _head_width(config)
    multiple("width", width, unit, f"{config.model_type} has one head for each {unit} of its width")
    values = shortened(scale_values(config, width, depth))
    if task is TASKS["next token"] and "is_decoder" in values:
        values |= {"is_decoder": True, "is_encoder_decoder": False}  # BERT and its kin do so only if told
    if task is TASKS["text"] and values.get("pad_token_id") is None:
        values["pad_token_id"] = 0  # a decoder classifies the last token that is no padding
    # Eager attention and experts are plain operations, which can be differentiated twice, forward and
    # backward; fused ones cannot. But which experts eager code runs depends on values, and on the meta device
    # there are none: there transformers may choose, which is grouped_mm for a model that has experts.
    hollow = torch.get_default_device().type == "meta"
    try:
        return getattr(transformers, task.auto).from_config(
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


def _config(path: str | Path) -> tuple[Any, Task]:
    """The config, made by transformers from the file, and what its model is trained for."""
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
    if "text_config" in config.sub_configs:  # of a model that also sees or hears, the part that reads
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
        raise UseError(f"{path}: {kind!r} has {error}, so its width and depth cannot be told") from None
    return config, task


def _head_width(config: Any) -> int:
    """By how much the width grows for one more head; not the head's dimension where the config gives that."""
    heads, width = _num_heads(config), size_of(config).width
    return width // math.gcd(width, heads) if heads else 1


def _heads_per_group(config: Any) -> int:
    """Heads that share a key/value head: widths of whole groups keep all proportions."""
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


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise UseError("hf: needs the package transformers: pip install 'theodolite[hf]'") from None
    return transformers
