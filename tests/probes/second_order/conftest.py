"""Tests of one network go to one worker, where its explicit Hessian is computed once."""

from __future__ import annotations

from pathlib import Path

import pytest

from .networks import CASES

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not item.path.is_relative_to(HERE) or not hasattr(item, "callspec"):
            continue
        network = next(
            (value for value in item.callspec.params.values() if isinstance(value, str) and value in CASES),
            None,
        )
        if network is not None:
            item.add_marker(pytest.mark.xdist_group(network))
