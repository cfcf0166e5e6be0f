from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="module")
def _dissected_once(one_dissection: None) -> None:
    pass
