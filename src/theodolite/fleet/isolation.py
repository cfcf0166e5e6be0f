"""Settings of the process around a run: standard ones at its start, and all as before at its end.

A run's numbers depend on its value alone, not on what ran before it in the same process, nor on what the
caller has set.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from theodolite.core.building import untouched_randomness
from theodolite.core.exclusive import exclusive

OwnSettings = Mapping[str, Any]
"""By name, the settings that a workload's file made when it was imported. They hold for its runs."""

ON_THIS_MACHINE = ("folder", "sys.path", "warnings")
"""Those that mean nothing on another machine."""


@contextlib.contextmanager
def isolated(own: OwnSettings | None = None) -> Iterator[dict[str, Any]]:
    """A block that begins with standard settings, and after which all settings are as before.

    Standard are torch's: float32 and the CPU by default, gradients, no anomaly mode, no deterministic
    algorithms, no autocast, full float32 precision, all backends. Folder, environment variables, `sys.path`
    and warning filters are the caller's. The random seed is 0. Other threads wait.

    Args:
        own: settings of a file, as an earlier block gave them.

    Yields:
        a dictionary, which after the block holds what was set in it.

    >>> torch.set_default_dtype(torch.float64)
    >>> with isolated() as changed:
    ...     print(torch.get_default_dtype())
    ...     torch.set_default_dtype(torch.bfloat16)
    torch.float32
    >>> torch.get_default_dtype(), changed
    (torch.float64, {'default dtype': torch.bfloat16})
    >>> torch.set_default_dtype(torch.float32)
    """
    changed: dict[str, Any] = {}
    with exclusive():
        before = {name: each.read() for name, each in _SETTINGS.items()}
        standard = {name: each.standard for name, each in _SETTINGS.items() if each.standard is not _CALLERS}
        start = _with(before | standard, own or {})
        # Leaving inference mode turns gradients on, also within no_grad.
        with torch.inference_mode(False), untouched_randomness(0):
            try:
                _put(start)
                yield changed
                now = {name: each.read() for name, each in _SETTINGS.items()}
                changed |= {name: _change(start[name], now[name]) for name in now if now[name] != start[name]}
            finally:
                _put(before)


@dataclass(frozen=True)
class _Setting:
    read: Callable[[], Any]
    write: Callable[[Any], object]
    standard: Any


_CALLERS = object()
"""Standard is what the caller has."""


def _put(state: Mapping[str, Any]) -> None:
    for name, setting in _SETTINGS.items():
        if setting.read() != state[name]:
            setting.write(state[name])


def _with(state: dict[str, Any], own: OwnSettings) -> dict[str, Any]:
    """The settings, overridden by those of a file, which may name only some variables and paths."""
    variables = state["environment"] | own.get("environment", {})
    first = own.get("sys.path", [])
    return {
        **state,
        **own,
        "environment": {name: value for name, value in variables.items() if value is not None},
        "sys.path": [*first, *(entry for entry in state["sys.path"] if entry not in first)],
    }


def _change(before: Any, now: Any) -> Any:
    if isinstance(now, dict):
        return {name: now.get(name) for name in before | now if now.get(name) != before.get(name)}
    return now


def _folder() -> str | None:
    with contextlib.suppress(OSError):  # it was removed
        return os.getcwd()
    return None


def _change_folder(folder: str | None) -> None:
    if folder is not None:
        with contextlib.suppress(OSError):
            os.chdir(folder)


def _set_environment(variables: Mapping[str, str]) -> None:
    for name in os.environ.keys() - variables.keys():
        del os.environ[name]
    for name, value in variables.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


def _set_path(path: list[str]) -> None:
    sys.path[:] = path


def _set_filters(filters: list[Any]) -> None:
    warnings.filters[:] = filters  # type: ignore[index]
    with warnings.catch_warnings():  # invalidates their cache
        pass


def _default_device() -> Any:
    context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return None if context is None else context.device


def _set_default_device(device: Any) -> None:
    torch.set_default_device(device)
    if device is None:  # torch 2.9 leaves a state in which torch.get_default_device() fails
        vars(torch._GLOBAL_DEVICE_CONTEXT).pop("device_context", None)


def _matmul_precision() -> str | None:
    with contextlib.suppress(RuntimeError):  # it was set in the new way, which is read and written below
        return torch.get_float32_matmul_precision()
    return None


def _set_matmul_precision(precision: str | None) -> None:
    if precision is not None:
        torch.set_float32_matmul_precision(precision)


def _autocast(device: str, dtype: torch.dtype) -> _Setting:
    def write(state: tuple[bool, torch.dtype]) -> None:
        torch.set_autocast_enabled(device, state[0])
        torch.set_autocast_dtype(device, state[1])

    read = lambda: (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))  # noqa: E731
    return _Setting(read, write, (False, dtype))


def _attributes(standard: Mapping[str, Any]) -> Iterator[tuple[str, _Setting]]:
    """Attributes below torch; not every version has all."""
    for path, value in standard.items():
        owner, _, name = path.rpartition(".")

        def write(value: Any, owner: str = owner, name: str = name) -> None:
            setattr(operator.attrgetter(owner)(torch), name, value)

        read = functools.partial(operator.attrgetter(path), torch)
        with contextlib.suppress(AttributeError, RuntimeError):
            read()
            yield f"torch.{path}", _Setting(read, write, value)


def _attentions() -> Iterator[tuple[str, _Setting]]:
    for kind in ("flash", "mem_efficient", "math", "cudnn"):
        read = getattr(torch.backends.cuda, f"{kind}_sdp_enabled", None)
        write = getattr(torch.backends.cuda, f"enable_{kind}_sdp", None)
        if read and write:
            yield f"{kind} attention", _Setting(read, write, True)


_SETTINGS: dict[str, _Setting] = {
    "folder": _Setting(_folder, _change_folder, _CALLERS),
    "environment": _Setting(lambda: dict(os.environ), _set_environment, _CALLERS),
    "sys.path": _Setting(lambda: list(sys.path), _set_path, _CALLERS),
    "warnings": _Setting(lambda: list(warnings.filters), _set_filters, _CALLERS),
    "numpy errors": _Setting(
        np.geterr,
        lambda kinds: np.seterr(**kinds),
        {"divide": "warn", "over": "warn", "under": "ignore", "invalid": "warn"},
    ),
    "default dtype": _Setting(torch.get_default_dtype, torch.set_default_dtype, torch.float32),
    "default device": _Setting(_default_device, _set_default_device, None),
    "gradients": _Setting(torch.is_grad_enabled, torch.set_grad_enabled, True),
    "threads": _Setting(torch.get_num_threads, torch.set_num_threads, _CALLERS),
    "deterministic algorithms": _Setting(
        lambda: (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        lambda state: torch.use_deterministic_algorithms(state[0], warn_only=state[1]),
        (False, False),
    ),
    "anomaly mode": _Setting(
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda state: torch.autograd.set_detect_anomaly(*state),
        (False, True),
    ),
    "flush denormal": _Setting(
        lambda: (torch.full((1,), 1e-40, dtype=torch.float32, device="cpu") * 1).item() == 0,
        torch.set_flush_denormal,
        False,
    ),
    "autocast on cpu": _autocast("cpu", torch.bfloat16),
    "autocast on cuda": _autocast("cuda", torch.float16),
    "autocast cache": _Setting(torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled, True),
    "matmul precision": _Setting(_matmul_precision, _set_matmul_precision, "highest"),
    **dict(
        _attributes(
            {
                "utils.deterministic.fill_uninitialized_memory": True,
                # From the general to the special: "none" follows the one before.
                "backends.fp32_precision": "none",
                "backends.cuda.matmul.fp32_precision": "none",
                "backends.cudnn.fp32_precision": "none",
                "backends.cudnn.conv.fp32_precision": "tf32",
                "backends.cudnn.rnn.fp32_precision": "tf32",
                "backends.mkldnn.fp32_precision": "none",
                "backends.mkldnn.matmul.fp32_precision": "none",
                "backends.mkldnn.conv.fp32_precision": "none",
                "backends.mkldnn.rnn.fp32_precision": "none",
                "backends.cuda.matmul.allow_fp16_reduced_precision_reduction": True,
                "backends.cuda.matmul.allow_bf16_reduced_precision_reduction": True,
                "backends.cuda.matmul.allow_fp16_accumulation": False,
                "backends.cudnn.enabled": True,
                "backends.cudnn.benchmark": False,
                "backends.cudnn.deterministic": False,
                "backends.mkldnn.enabled": True,
                "backends.mkldnn.deterministic": False,
            }
        )
    ),
    **dict(_attentions()),
}
"""In the order in which they are put back."""
