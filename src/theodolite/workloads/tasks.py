"""What models of transformers are trained for, with synthetic batches of fitting names and shapes."""

# B batch, T tokens or frames, V vocabulary

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from theodolite import data
from theodolite.core.batches import Batch
from theodolite.core.errors import UseError
from theodolite.workloads.builtin import next_token_loss

NUM_EXAMPLES, LENGTH = 4, 64
"""Examples in a batch, and the most tokens, pixels along a side or frames of sound in each."""
MASKED = 0.15
"""The share of tokens that a masked language model has to guess, as in BERT."""
SPELT = 8
"""Symbols that are spoken in a recording."""

Draw = Callable[[Any, int, int], Batch]
"""`draw(config, seed, step)`."""


@dataclass(frozen=True)
class Task:
    """One of the tasks that transformers has a family of models for."""

    auto: str
    """The class that builds a model from a config."""
    mapping: str
    """From the class of a config to the classes of models."""
    draw: Draw
    loss: Callable[[Tensor, Any], Tensor]


def find_task(transformers: Any, config: Any) -> Task | None:
    """The task of the model that the config names, else the usual one of its kind; None if there is none.

    A config names its model by `architectures`. Without it, or with a model that has no head, an
    encoder–decoder translates, an encoder of text guesses masked tokens, a decoder the next one.
    """
    known = [task for task in TASKS.values() if type(config) in getattr(transformers, task.mapping)]
    for name in config.architectures or ():
        for task in known:
            classes = getattr(transformers, task.mapping)[type(config)]
            if name in [one.__name__ for one in (classes if isinstance(classes, tuple) else (classes,))]:
                return task
    usual = ["next token", "image", "recording", "sound", "text", "tokens"]
    if not getattr(config, "is_decoder", False):
        usual.insert(0, "masked tokens")
    if getattr(config, "is_encoder_decoder", False):
        usual = ["speech to text", "text to text", *usual]
    return next((TASKS[name] for name in usual if TASKS[name] in known), None)


def shortened(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a config with small images and short clips, and with every layer in every pass."""
    found = dict(values)
    if "max_source_positions" in found and "num_mel_bins" in found:
        found["max_source_positions"] = min(found["max_source_positions"], LENGTH)
    if isinstance(found.get("image_size"), int):
        patch = found["patch_size"] if isinstance(found.get("patch_size"), int) else 1
        # A window fits into what the last stage sees.
        window = found.get("window_size", 1) * 2 ** (len(found.get("depths") or [1]) - 1)
        found["image_size"] = min(found["image_size"], patch * max(window, LENGTH // patch))
    for key in found:
        if key.endswith("layerdrop"):
            found[key] = 0.0
    if "apply_spec_augment" in found:
        found["apply_spec_augment"] = False
    return found


def ctc_loss(logits_BTV: Tensor, spelt_BS: Tensor) -> Tensor:
    """Connectionist temporal classification over all frames; symbol 0 is the blank.

    >>> ctc_loss(torch.zeros(1, 2, 4), torch.tensor([[1]])).exp()  # 3 of 16 ways spell it
    tensor(5.3333)
    """
    frames = torch.full((len(logits_BTV),), logits_BTV.shape[1])
    spelt = torch.full((len(spelt_BS),), spelt_BS.shape[1])
    rows_TBV = logits_BTV.float().log_softmax(-1).transpose(0, 1)
    return nn.functional.ctc_loss(rows_TBV, spelt_BS, frames, spelt)


def _text(config: Any, seed: int, step: int) -> tuple[Tensor, Tensor]:
    """Bytes, and the ones that follow."""
    longest = getattr(config, "max_position_embeddings", None) or LENGTH
    tokens_BT, targets_BT = data.draw_text(
        data.state_of_the_union(), num=NUM_EXAMPLES, length=min(LENGTH, longest), seed=seed, step=step
    )
    return tokens_BT % config.vocab_size, targets_BT % config.vocab_size


def _masked(config: Any, seed: int, step: int) -> Batch:
    """Text in which some tokens are hidden behind the last of the vocabulary; only these are targets."""
    tokens_BT, _ = _text(config, seed, step)
    hidden_BT = torch.rand(tokens_BT.shape, generator=_generator(seed, step)) < MASKED
    hidden_BT[:, 0] = True
    return tokens_BT.masked_fill(hidden_BT, config.vocab_size - 1), tokens_BT.masked_fill(~hidden_BT, -100)


def _translated(config: Any, seed: int, step: int) -> Batch:
    """Text, to be written again."""
    tokens_BT, targets_BT = _text(config, seed, step)
    return {"input_ids": tokens_BT, "decoder_input_ids": tokens_BT}, targets_BT


def _transcribed(config: Any, seed: int, step: int) -> Batch:
    """Spectrograms, and text that has nothing to do with them."""
    tokens_BT, targets_BT = _text(config, seed, step)
    shape = NUM_EXAMPLES, _needed(config, "num_mel_bins"), 2 * _needed(config, "max_source_positions")
    features = torch.randn(shape, generator=_generator(seed, step))
    return {"input_features": features, "decoder_input_ids": tokens_BT}, targets_BT


def _spelt(config: Any, seed: int, step: int) -> Batch:
    """Noise, and symbols that it is to spell."""
    generator = _generator(seed, step)
    symbols = torch.randint(1, config.vocab_size, (NUM_EXAMPLES, SPELT), generator=generator)
    return torch.randn(NUM_EXAMPLES, _samples(config), generator=generator), symbols


def _sorted_sounds(config: Any, seed: int, step: int) -> Batch:
    return _of_classes((_samples(config),), config.num_labels, seed, step)


def _sorted_images(config: Any, seed: int, step: int) -> Batch:
    side = getattr(config, "image_size", None) or LENGTH
    sides = tuple(side) if isinstance(side, (tuple, list)) else (side, side)
    return _of_classes((getattr(config, "num_channels", 3), *sides), config.num_labels, seed, step)


def _sorted_texts(config: Any, seed: int, step: int) -> Batch:
    tokens_BT, _ = _text(config, seed, step)
    return tokens_BT, tokens_BT.sum(1) % config.num_labels


def _sorted_tokens(config: Any, seed: int, step: int) -> Batch:
    tokens_BT, _ = _text(config, seed, step)
    return tokens_BT, tokens_BT % config.num_labels


def _of_classes(shape: tuple[int, ...], classes: int, seed: int, step: int) -> Batch:
    """Noise around one pattern for each class."""
    labels = torch.randint(classes, (NUM_EXAMPLES,), generator=_generator(seed, step))
    patterns = [torch.randn(shape, generator=torch.Generator().manual_seed(int(label))) for label in labels]
    noise = torch.randn(NUM_EXAMPLES, *shape, generator=_generator(seed, step))
    return (torch.stack(patterns) + noise) / math.sqrt(2), labels


def _samples(config: Any) -> int:
    """Of a wave, for half of LENGTH frames."""
    return math.prod(_needed(config, "conv_stride")) * LENGTH // 2


def _needed(config: Any, name: str) -> Any:
    value = getattr(config, name, None)
    if value is None:
        raise UseError(
            f"the config of {config.model_type} has no {name}, so that no inputs can be made for it. Write a "
            "Workload for it"
        )
    return value


def _generator(seed: int, step: int) -> torch.Generator:
    return torch.Generator().manual_seed(1_000_003 * seed + step)


_classes = nn.functional.cross_entropy
TASKS = {
    "next token": Task("AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING", _text, next_token_loss),
    "masked tokens": Task("AutoModelForMaskedLM", "MODEL_FOR_MASKED_LM_MAPPING", _masked, next_token_loss),
    "text to text": Task(
        "AutoModelForSeq2SeqLM", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING", _translated, next_token_loss
    ),
    "speech to text": Task(
        "AutoModelForSpeechSeq2Seq", "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING", _transcribed, next_token_loss
    ),
    "image": Task(
        "AutoModelForImageClassification", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING", _sorted_images, _classes
    ),
    "recording": Task("AutoModelForCTC", "MODEL_FOR_CTC_MAPPING", _spelt, ctc_loss),
    "sound": Task(
        "AutoModelForAudioClassification", "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING", _sorted_sounds, _classes
    ),
    "text": Task(
        "AutoModelForSequenceClassification",
        "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING",
        _sorted_texts,
        _classes,
    ),
    "tokens": Task(
        "AutoModelForTokenClassification",
        "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING",
        _sorted_tokens,
        next_token_loss,
    ),
}
