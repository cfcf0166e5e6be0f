"""Print digests of batches, drawn in a process of its own with another history."""

import hashlib

import torch

from theodolite import data


def drawn(step: int) -> str:
    """A digest of a batch of text and one of examples."""
    text = data.draw_text(data.state_of_the_union(), num=4, length=32, seed=1, step=step)
    points = data.draw_examples(data.mixture(500), num=50, seed=1, step=step)
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in (*text, *points))).hexdigest()


if __name__ == "__main__":
    torch.manual_seed(99)
    print(*map(drawn, (40, 3)))
