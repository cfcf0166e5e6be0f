"""Networks of every family: what dissect says of each tensor is true, and a plan keeps what modules learn."""

from __future__ import annotations

from typing import Any

import pytest

from .collection import exhibits
from .exhibit import Exhibit
from .measuring import over_depth, over_width, wrong_roles

KNOWN_WRONG: dict[str, str] = {}
"""By name of an exhibit, what dissect gets wrong."""
KNOWN_STEEP: dict[str, str] = {}
"""By name of a cheap exhibit, why a plan does not keep what its modules learn."""


def _marked(chosen: list[Exhibit], known: dict[str, str]) -> list[Any]:
    return [
        pytest.param(
            one,
            id=one.name,
            marks=[pytest.mark.xfail(reason=known[one.name])] if one.name in known else [],
        )
        for one in chosen
    ]


@pytest.mark.parametrize("exhibit", _marked(exhibits(), KNOWN_WRONG))
def test_dissect_finds_every_role_and_branch(exhibit: Exhibit) -> None:
    assert wrong_roles(exhibit) == []


@pytest.mark.parametrize("exhibit", _marked([one for one in exhibits() if one.cheap], KNOWN_STEEP))
def test_every_module_learns_as_much_at_every_size(exhibit: Exhibit) -> None:
    slopes = [*over_width(exhibit), *over_depth(exhibit)]
    assert slopes
    assert [one for one in slopes if not one.right] == []


def test_what_is_known_to_be_wrong_is_an_exhibit() -> None:
    assert KNOWN_WRONG.keys() <= {one.name for one in exhibits()}
    assert KNOWN_STEEP.keys() <= {one.name for one in exhibits() if one.cheap}
