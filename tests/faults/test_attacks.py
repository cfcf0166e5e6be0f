"""A few tries of every attack; `make attack` makes many."""

from __future__ import annotations

from pathlib import Path

import pytest

from .attack import Attack, found

EVERY = [
    pytest.param(attack, id=f"{subject}-{attack.title}")
    for subject, attacks in found().items()
    for attack in attacks
    if attack.few  # some take a minute each
]


@pytest.mark.parametrize("attack", EVERY)
def test_what_is_promised_holds(attack: Attack, tmp_path: Path) -> None:
    results = list(attack.tries(attack.few, tmp_path))
    assert len(results) == attack.few
    assert [fault for fault in results if fault is not None] == []
