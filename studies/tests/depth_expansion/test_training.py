"""Images and training of the study of depth expansion."""

import pytest
import torch
import torch.nn.functional as F

from theodolite.core.errors import UseError
from theodolite_studies.depth_expansion.training import PAD, Recipe, images_of, itinerary, train

from .networks import network


def test_a_crop_is_a_window_of_the_image_on_black():
    images = images_of("templates", "train", num=3, side=8)
    rows, down, across, mirrored = torch.tensor([[2, 0], [0, 7], [5, 4], [1, 0]])
    found = images.cut(rows, down, across, mirrored)
    black = torch.nn.functional.pad(images.padded[:, PAD:-PAD, PAD:-PAD].permute(0, 3, 1, 2), (PAD,) * 4)
    first = black[2, :, 0:8, 5:13].flip(2)
    second = black[0, :, 7:15, 4:12]
    expected = (torch.stack([first, second]) / 255 - 0.5) / 0.2
    assert torch.allclose(found, expected)
    assert (found[0, :, :4] == -2.5).all()  # above the image it is black


def test_unknown_images_are_refused():
    with pytest.raises(UseError, match=r"'stripes'.*'cifar10' or 'templates'"):
        images_of("stripes", "train")


@pytest.mark.parametrize("augmented", [False, True])
def test_networks_are_trained_as_sgd_trains_each_alone(augmented):
    images = images_of("templates", "train", num=20, side=8, dtype=torch.float64)
    recipe = Recipe(epochs=2, batch=8, lr=0.2, augmented=augmented, decay=1e-2, warmup=0.5)
    models, alone = [[network(seed) for seed in (0, 1)] for _ in range(2)]  # two of each, which begin alike
    losses = train(models, (0, 1), images, recipe)
    for place, model in enumerate(alone):
        sgd = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9, weight_decay=1e-2)
        way = itinerary(20, recipe, seed=place)
        for step, rate in enumerate((0.1, 0.2, 0.2, 0.1)):
            rows, down, across, mirrored = way[:, step]
            pixels = [
                images.padded[row, d : d + 8, a : a + 8].permute(2, 0, 1).flip(2 if m else ())
                for row, d, a, m in zip(rows, down, across, mirrored, strict=True)
            ]
            inputs = (torch.stack(pixels).double() / 255 - 0.5) / 0.2
            loss = F.cross_entropy(model(inputs), images.labels[rows])
            sgd.param_groups[0]["lr"] = rate
            sgd.zero_grad()
            loss.backward()
            sgd.step()
            assert float(losses[step, place]) == pytest.approx(loss.item(), rel=1e-6)
        for name, tensor in model.state_dict().items():
            assert torch.allclose(models[place].state_dict()[name], tensor, rtol=1e-9, atol=1e-12), name
    assert not any(model.training for model in models)


def test_seeds_see_their_own_crops_and_every_image_once_in_an_epoch():
    recipe = Recipe(epochs=3, batch=5, lr=0.1, augmented=True)
    first, second = (itinerary(10, recipe, seed=seed) for seed in (0, 1))
    assert not torch.equal(first, second)
    assert first[0].reshape(3, 10).sort().values.tolist() == [list(range(10))] * 3
    assert set(first[1:3].unique().tolist()) == set(range(2 * PAD + 1))
    assert set(first[3].unique().tolist()) == {0, 1}


def test_a_batch_larger_than_the_images_is_refused():
    with pytest.raises(UseError, match="4 images are too few for a batch of 8"):
        Recipe(epochs=1, batch=8, lr=0.1, augmented=False).steps(4)
