"""`examples/images.py` with few steps of training: its PNG, decoded by the specification, and its labels."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from theodolite import data, flows

from .png import decoded

pytestmark = pytest.mark.usefixtures("one_dissection")

EXAMPLE = Path(__file__).parents[1] / "examples" / "images.py"
ENLARGED = 3


@pytest.fixture
def run(
    need: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[int], dict[str, Any]]:
    """Run the example for some steps in an empty folder; its variables."""
    need("fashion-mnist")
    monkeypatch.chdir(tmp_path)

    def run(steps: int) -> dict[str, Any]:
        monkeypatch.setattr(sys, "argv", [str(EXAMPLE), str(steps)])
        return runpy.run_path(str(EXAMPLE), run_name="__main__")

    return run


def cells() -> NDArray[np.uint8]:
    """The images of the file: row, column, height, width."""
    pixels = decoded(Path("images.png").read_bytes())
    assert pixels.shape == (4 * 28 * ENLARGED, 10 * 28 * ENLARGED)
    small = pixels[::ENLARGED, ::ENLARGED]
    np.testing.assert_array_equal(small.repeat(ENLARGED, 0).repeat(ENLARGED, 1), pixels)
    return np.stack([np.stack(np.split(row, 10, axis=1)) for row in np.split(small, 4)])


def test_real_images_in_the_place_of_samples_come_back_from_the_file(run, monkeypatch) -> None:
    rows = iter(torch.arange(40).split(20))
    monkeypatch.setattr(flows, "sample", lambda *_, **__: data.fashion_mnist("test").inputs(next(rows)))
    run(1)
    expected = data.fashion_mnist("test").values[:40].view(4, 10, 28, 28)
    np.testing.assert_array_equal(cells(), expected.numpy())


def test_columns_are_classes_and_rows_are_guided_samples(run, monkeypatch) -> None:
    fields = []
    follow = flows.sample

    def sample(field: flows.Field, noise: Tensor, **options: Any) -> Tensor:
        fields.append(field)
        return follow(field, noise, **options)

    monkeypatch.setattr(flows, "sample", sample)
    model = run(24)["model"]
    x, t = torch.randn(20, 1, 28, 28), torch.rand(20)
    with torch.no_grad():
        labelled = model(x, t, torch.tensor([*range(10), *range(10)]))
        unlabelled = model(x, t, torch.full((20,), 10))
        assert (labelled - unlabelled).norm() > 1e-3 * labelled.norm()
        torch.testing.assert_close(fields[0](x, t), labelled)
        torch.testing.assert_close(fields[1](x, t), 2 * labelled - unlabelled)

    # The first steps teach that clothes are bright in the middle and dark in the corners: 5 times as bright
    # after 24 steps, 1.1 times before training.
    found = cells().astype(float)
    corners = found[..., [0, 0, -1, -1], [0, -1, 0, -1]].mean()
    assert found[..., 10:18, 10:18].mean() > 2 * corners


def test_help_is_its_docstring(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), "--help"])
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert not left.value.code
    assert "images.py 2000` trains for 2000\nsteps" in capsys.readouterr().out
