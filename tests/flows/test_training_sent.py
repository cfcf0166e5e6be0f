"""Batches of noisy data are drawn in other processes too."""

import pickle
from functools import partial

import torch

from theodolite.flows.mixture import GaussianMixture
from theodolite.flows.training import noisy


def test_the_function_of_batches_can_be_sent():
    """Pickled as multiprocessing does it. The draw is a method, called as `sample(4, seed, step)`."""
    draw = partial(GaussianMixture([[0.0, 1.0], [2.0, 0.0]], std=1.0).sample, 4)
    for path in ("linear", "trigonometric", "variance-preserving"):
        batch = noisy(draw, path=path, classes=2, label_dropout=0.5, name="sent")
        sent = pickle.loads(pickle.dumps(batch))(1, 2)
        torch.testing.assert_close(sent, batch(1, 2), rtol=0, atol=0)
