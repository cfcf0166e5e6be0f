"""The progress type of `probes.signal`."""

from collections.abc import Callable

Progress = Callable[[float], None]
