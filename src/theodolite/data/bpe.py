"""Byte-pair encoding, trained on a text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from theodolite.core.errors import UseError
from theodolite.data.sets import Text


@dataclass(frozen=True)
class Bpe:
    """A byte-pair encoding: every token is a piece of one or more bytes, so any bytes can be encoded.

    Args:
        pieces: the bytes of each token.
        tokenizer: the `tokenizers.Tokenizer`.
    """

    pieces: tuple[bytes, ...]
    tokenizer: Any

    def encode(self, text: Text) -> Text:
        """The same text in tokens of this encoding."""
        if text.vocab > 256:
            raise UseError(
                f"{text.name} has a vocabulary of {text.vocab}: only a text of bytes can be encoded"
            )
        ids = self.tokenizer.encode(_characters(text)).ids
        return Text(
            f"{text.name}-bpe{len(self.pieces)}", torch.tensor(ids, dtype=torch.int32), len(self.pieces)
        )

    def decode(self, tokens: Tensor) -> bytes:
        """The bytes of these tokens."""
        return b"".join(self.pieces[token] for token in tokens.tolist())


def train_bpe(text: Text, vocab: int) -> Bpe:
    """Learn `vocab` tokens, the 256 bytes and the pieces that most often follow each other within a word.

    Needs `tokenizers`, which `pip install 'theodolite[hf]'` brings.

    >>> banana = Text("banana", torch.tensor(list(b"banana banana banana"), dtype=torch.uint8), 256)
    >>> bpe = train_bpe(banana, vocab=261)
    >>> len(bpe.encode(banana).tokens), bpe.decode(bpe.encode(banana).tokens)
    (3, b'banana banana banana')

    References:
        Sennrich, Haddow, Birch, Neural machine translation of rare words with subword units, 2016.
    """
    if vocab < 256:
        raise UseError(f"vocab is {vocab}: every byte is a token, so give 256 or more")
    try:
        import tokenizers
    except ImportError:
        raise UseError(
            "a byte-pair encoding needs the package tokenizers: pip install 'theodolite[hf]'"
        ) from None

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
    """Byte b as the character of number b: any bytes are a string, even half a UTF-8 character."""
    return bytes(text.tokens.to(torch.uint8).tolist()).decode("latin-1")
