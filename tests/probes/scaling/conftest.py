"""A network is dissected once at each size, for all optimizers, parameterizations and seeds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ...shared_anatomies import shared_anatomies


@pytest.fixture(scope="module", autouse=True)
def _one_dissection_for_probes() -> Iterator[None]:
    with shared_anatomies(*(f"probes.scaling.{name}" for name in ("assumptions", "coordinates", "spectral"))):
        yield
