from __future__ import annotations

from collections.abc import Iterator

import pytest

from ..shared_anatomies import shared_anatomies


@pytest.fixture(autouse=True, scope="module")
def _dissected_once() -> Iterator[None]:
    with shared_anatomies("fleet.plans"):
        yield
