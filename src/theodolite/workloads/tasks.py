"""What models of transformers are trained for, with synthetic batches for each task."""

# B batch, T tokens or frames, V vocabulary

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from theodolite import data
from theodolite.core.batches import Batch
from theodolite.core.errors import UseError
from theodolite.workloads.builtin import next_token_loss

NUM_EXAMPLES, LENGTH = 4, 64
"""Examples in a batch, and the most tokens, pixels along a side, or frames of sound in each."""
MASKED = 0.15
"""The fraction of tokens that a masked language model predicts, as in BERT."""
SYMBOLS = 8
"""Symbols in a recording."""

Draw = Callable[[Any, int, int], Batch]
"""`draw(config, seed, step)`."""


@dataclass(frozen=True)
class Task:
    """A task for which transformers has a family of models."""

    auto: str
    """`AutoModelFor…` builds a model from a config."""
    mapping: str
    """`MODEL_FOR_…_MAPPING` maps classes of configs to classes of models."""
    draw: Draw
    loss: Callable[[Tensor, Any], Tensor]


def find_task(transformers: Any, config: Any) -> Task | None:
    """The task of the model that the config names, else the usual one of its kind; None if there is none.

    A config names its model by `architectures`. Without it, or for a model without a head, the task of an
    encoder–decoder is translation, of a text encoder masked tokens, of a decoder the next token.
    """
    known = {}
    for task in TASKS.values():
        if classes := getattr(transformers, f"MODEL_FOR_{task.mapping}_MAPPING").get(type(config), None):
            known[task] = classes if isinstance(classes, tuple) else (classes,)
    for name in config.architectures or ():
        for task, classes in known.items():
            if name in [one.__name__ for one in classes]:
                return task
    usual = ["next token", "image", "recording", "sound", "text", "tokens"]
    if not getattr(config, "is_decoder", False):
        usual.insert(0, "masked tokens")
    if getattr(config, "is_encoder_decoder", False):
        usual = ["speech to text", "text to text", *usual]
    return next((TASKS[name] for name in usual if TASKS[name] in known), None)


def shortened(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a config with small images, short clips and no random dropping of layers."""
    found = dict(values)
    if "max_source_positions" in found and "num_mel_bins" in found:
        found["max_source_positions"] = min(found["max_source_positions"], LENGTH)
    if isinstance(found.get("image_size"), int):
        patch = found["patch_size"] if isinstance(found.get("patch_size"), int) else 1
        # A window has to fit into the image of the last stage.
        window = found.get("window_size", 1) * 2 ** (len(found.get("depths") or [1]) - 1)
        found["image_size"] = min(found["image_size"], patch * max(window, LENGTH // patch))
    for key in found:
        if key.endswith("layerdrop"):
            found[key] = 0.0
    if "apply_spec_augment" in found:
        found["apply_spec_augment"] = False
    return found


def ctc_loss(logits_BTV: Tensor, symbols_BS: Tensor) -> Tensor:
    """Connectionist temporal classification over all frames; symbol 0 is the blank.

    >>> ctc_loss(torch.zeros(1, 2, 4), torch.tensor([[1]])).exp()  # 3 of 16 sequences give the symbol
    tensor(5.3333)
    """
    frames = torch.full((len(logits_BTV),), logits_BTV.shape[1])
    lengths = torch.full((len(symbols_BS),), symbols_BS.shape[1])
    rows_TBV = logits_BTV.float().log_softmax(-1).transpose(0, 1)
    return nn.functional.ctc_loss(rows_TBV, symbols_BS, frames, lengths)


def _text(config: Any, seed: int, step: int) -> tuple[Tensor, Tensor]:
    """Bytes, and the next byte of each."""
    longest = getattr(config, "max_position_embeddings", None) or LENGTH
    tokens_BT, targets_BT = data.draw_text(
        data.state_of_the_union(), num=NUM_EXAMPLES, length=min(LENGTH, longest), seed=seed, step=step
    )
    return tokens_BT % config.vocab_size, targets_BT % config.vocab_size


def _masked(config: Any, seed: int, step: int) -> Batch:
    """Text in which some tokens are replaced by the last of the vocabulary; only these are targets."""
    tokens_BT, _ = _text(config, seed, step)
    hidden_BT = torch.rand(tokens_BT.shape, generator=_generator(seed, step)) < MASKED
    hidden_BT[:, 0] = True
    return tokens_BT.masked_fill(hidden_BT, config.vocab_size - 1), tokens_BT.masked_fill(~hidden_BT, -100)


def _translated(config: Any, seed: int, step: int) -> Batch:
    """Text, and the same text to predict."""
    tokens_BT, targets_BT = _text(config, seed, step)
    return {"input_ids": tokens_BT, "decoder_input_ids": tokens_BT}, targets_BT


def _transcribed(config: Any, seed: int, step: int) -> Batch:
    """Spectrograms of noise, and unrelated text."""
    tokens_BT, targets_BT = _text(config, seed, step)
    shape = NUM_EXAMPLES, _needed(config, "num_mel_bins"), 2 * _needed(config, "max_source_positions")
    features = torch.randn(shape, generator=_generator(seed, step))
    return {"input_features": features, "decoder_input_ids": tokens_BT}, targets_BT


def _spoken(config: Any, seed: int, step: int) -> Batch:
    """Noise, and random symbols."""
    generator = _generator(seed, step)
    symbols = torch.randint(1, config.vocab_size, (NUM_EXAMPLES, SYMBOLS), generator=generator)
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
    """Samples of a wave with LENGTH/2 frames."""
    return math.prod(_needed(config, "conv_stride")) * LENGTH // 2


def _needed(config: Any, name: str) -> Any:
    value = getattr(config, name, None)
    if value is None:
        raise UseError(
            f"the config of {config.model_type} has no {name}, which is needed to make inputs. Write a "
            "Workload for it"
        )
    return value


def _generator(seed: int, step: int) -> torch.Generator:
    return torch.Generator().manual_seed(1_000_003 * seed + step)


TASKS = {
    "next token": Task("CausalLM", "CAUSAL_LM", _text, next_token_loss),
    "masked tokens": Task("MaskedLM", "MASKED_LM", _masked, next_token_loss),
    "text to text": Task("Seq2SeqLM", "SEQ_TO_SEQ_CAUSAL_LM", _translated, next_token_loss),
    "speech to text": Task("SpeechSeq2Seq", "SPEECH_SEQ_2_SEQ", _transcribed, next_token_loss),
    "image": Task("ImageClassification", "IMAGE_CLASSIFICATION", _sorted_images, cross_entropy),
    "recording": Task("CTC", "CTC", _spoken, ctc_loss),
    "sound": Task("AudioClassification", "AUDIO_CLASSIFICATION", _sorted_sounds, cross_entropy),
    "text": Task("SequenceClassification", "SEQUENCE_CLASSIFICATION", _sorted_texts, cross_entropy),
    "tokens": Task("TokenClassification", "TOKEN_CLASSIFICATION", _sorted_tokens, next_token_loss),
}
