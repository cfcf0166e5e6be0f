"""The texts are what they are said to be, and their parts do not overlap."""

from __future__ import annotations

import hashlib
import math

import pytest
import torch

from theodolite import UseError, data


def _bytes(text: data.Text) -> bytes:
    return text.tokens.numpy().tobytes()


def test_every_tenth_address_is_for_validation_and_nothing_is_lost() -> None:
    train, validation = (_bytes(data.state_of_the_union(split)) for split in ("train", "validation"))
    trained, held_out = train.splitlines(), validation.splitlines()
    # One address in each of 161 years, a second one in 1953 and 1961, none in 1933.
    assert len(trained) + len(held_out) == 162
    assert len(held_out) == 16
    assert not set(trained) & set(held_out)
    assert len(train) + len(validation) == 7_696_080
    assert 0.07 < len(validation) / 7_696_080 < 0.1


@pytest.mark.parametrize(
    ("president", "words"),
    [
        ("Lincoln, 1862", b"The dogmas of the quiet past are inadequate to the stormy present"),
        ("F. D. Roosevelt, 1941", b"freedom from want"),
        ("Johnson, 1964", b"unconditional war on poverty"),
        ("G. W. Bush, 2002", b"axis of evil"),
    ],
)
def test_the_addresses_contain_their_best_known_words(president: str, words: bytes) -> None:
    assert words in _bytes(data.state_of_the_union()) + _bytes(data.state_of_the_union("validation")), (
        president
    )


def test_the_addresses_are_english() -> None:
    text = data.state_of_the_union()
    frequency = text.tokens.bincount(minlength=256).double() / len(text.tokens)
    entropy = -(frequency * frequency.clamp(min=1e-12).log()).sum().item() / math.log(2)
    assert 4.1 < entropy < 4.5  # English with capitals and spaces, Shannon 1951: about 4.1 to 4.3 bits
    assert chr(int(frequency.argmax())) == " "
    letters = [chr(byte) for byte in frequency.argsort(descending=True).tolist()][1:7]
    assert set(letters) == set("etoain")


def test_a_part_that_is_not_there_is_refused() -> None:
    with pytest.raises(UseError, match="sotu has no 'test' part: give 'train' or 'validation'"):
        data.state_of_the_union("test")


def test_enwik8_is_the_published_file_in_the_usual_parts(need) -> None:
    need("enwik8")
    parts = [data.enwik8(split) for split in ("train", "validation", "test")]
    assert [len(part.tokens) for part in parts] == [90_000_000, 5_000_000, 5_000_000]
    whole = torch.cat([part.tokens for part in parts])
    digest = hashlib.md5(whole.numpy().tobytes(), usedforsecurity=False).hexdigest()
    assert digest == "a1fa5ffddb56f4953e226637dabbb36a"  # Large text compression benchmark
