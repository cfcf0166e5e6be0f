"""Digests: by what a value is known again, and seen to be the one that was written."""

from __future__ import annotations

import hashlib
import json
from typing import Any


def digest_of(value: Any) -> str:
    """The SHA-256 of a value of JSON, in 64 hexadecimal digits. The order of keys does not matter.

    >>> digest_of({"lr": 0.1, "size": (64, 2)}) == digest_of({"size": [64, 2], "lr": 0.1})
    True
    """
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))  # ASCII, whatever the value holds
    return hashlib.sha256(text.encode()).hexdigest()
