"""A byte-pair encoding loses nothing and makes texts shorter."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from theodolite import UseError, data


@pytest.fixture(scope="module")
def text() -> data.Text:
    pytest.importorskip("tokenizers")
    return data.Text("beginning", data.state_of_the_union().tokens[:300_000], vocab=256)


def test_a_text_survives_the_way_there_and_back(text: data.Text) -> None:
    bpe = data.train_bpe(text, vocab=512)
    held_out = data.Text("end", data.state_of_the_union("validation").tokens[-50_000:], vocab=256)
    for original in (text, held_out):
        encoded = bpe.encode(original)
        assert encoded.vocab == 512
        assert int(encoded.tokens.max()) < 512
        assert bpe.decode(encoded.tokens) == original.tokens.numpy().tobytes()


def test_bytes_that_are_no_text_survive_too(text: data.Text) -> None:
    noise = np.random.default_rng(0).integers(0, 256, 20_000, dtype=np.uint8)
    bpe = data.train_bpe(text, vocab=300)
    assert bpe.decode(bpe.encode(data.Text("noise", torch.from_numpy(noise), 256)).tokens) == noise.tobytes()


def test_a_larger_vocabulary_makes_a_shorter_text(text: data.Text) -> None:
    lengths = [len(data.train_bpe(text, vocab).encode(text).tokens) for vocab in (256, 512, 2048)]
    assert lengths[0] == 300_000
    assert lengths[0] > 1.5 * lengths[1] > 1.5 * 1.3 * lengths[2]


def test_training_twice_gives_the_same_encoding(text: data.Text) -> None:
    assert data.train_bpe(text, 400).pieces == data.train_bpe(text, 400).pieces


def test_fewer_tokens_than_bytes_are_refused() -> None:
    with pytest.raises(UseError, match="vocab is 255"):
        data.train_bpe(data.state_of_the_union(), 255)


def test_a_missing_extra_is_named(monkeypatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    with pytest.raises(UseError, match=r"pip install 'theodolite\[hf\]'"):
        data.train_bpe(data.state_of_the_union(), 300)
