"""Plans as JSON files: whole or not there, and read back exactly as they were."""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from theodolite.anatomy.part import ROLES
from theodolite.core.calling import Build
from theodolite.core.errors import UseError
from theodolite.core.files import read_json, write_whole
from theodolite.optimizers import OPTIMIZERS, POLICIES
from theodolite.planning.law import Law
from theodolite.planning.plan import Plan, Row

KIND = "theodolite plan"
VERSION = 1


def save(plan: Plan, path: str | Path) -> Path:
    """Write the plan as JSON; a reader sees the old file or the new one, never a half."""
    path = plan_path(path)
    write_whole(path, to_json(plan))
    return path


def plan_path(path: str | Path) -> Path:
    """The path a plan may be written to; it takes the place of nothing but an older plan."""
    path = Path(path).expanduser()
    refused = f"the plan cannot be written to {path}"
    if not path.parent.is_dir():
        raise UseError(f"{refused}: there is no folder {path.parent}")
    if path.is_dir():
        raise UseError(f"{refused}: that is a folder. Name a file, for example {path / 'plan.json'}")
    if path.exists() and not _is_plan(path):
        raise UseError(f"{refused}: there is a file that is no plan. Give the plan another name")
    return path


def to_json(plan: Plan) -> str:
    """Everything in the plan but the function that builds the network."""
    content = {"kind": KIND, "version": VERSION, **_plain(plan, "the plan")}
    return json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def load(path: str | Path, build: Build | None = None) -> Plan:
    """Read a plan that `save` wrote. `build` is what `plan.build` will call."""
    path = Path(path).expanduser()
    content = read_json(path)
    if not isinstance(content, dict) or content.get("kind") != KIND:
        raise UseError(f'{path} is not a plan: it has no "kind": "{KIND}". Plans are written by plan.save')
    if content.get("version") != VERSION:
        raise UseError(
            f"{path} has version {content.get('version')!r} of the format, and this is version {VERSION}. "
            "Plan again, or use the version of theodolite that wrote it"
        )
    del content["kind"], content["version"]
    try:
        plan: Plan = _read(Plan, content, "the plan")
        _check(plan)
    except (_Misfit, UseError) as error:
        raise UseError(
            f"{path} is not a plan to train by: {error}. Correct it, or save the plan again"
        ) from None
    return dataclasses.replace(plan, build_function=build)


def _is_plan(path: Path) -> bool:
    try:
        content = read_json(path)
    except UseError:
        return False
    return isinstance(content, dict) and content.get("kind") == KIND


class _Misfit(Exception):
    """Something in the file that is not as it should be."""


LARGEST = float(np.finfo(np.float32).max) / 100
"""Of a planned number: weights are drawn in float32, several standard deviations from their mean."""


def _check(plan: Plan) -> None:
    """Refuse numbers that no network can be drawn or trained by. People edit plans by hand."""
    _check_numbers(plan, "the plan", not_negative=("lr", "weight_decay", "eps"))
    _check_choice(plan.policy, "the plan: policy", POLICIES)
    for module, factor in plan.multipliers.items():
        _check_number(factor, f"the plan: multipliers: {module}", factor != 0, "other than 0")
    for name, row in plan.rows.items():
        where = f"the plan: rows: {name}"
        if row.name != name:
            raise _Misfit(f"{where}: name is {row.name!r}, which has to be {name!r}")
        _check_choice(row.role, f"{where}: role", ROLES)
        if row.trained or row.rule:
            _check_choice(
                row.rule, f"{where}: rule", tuple(dict.fromkeys((plan.optimizer_name, *OPTIMIZERS)))
            )
        _check_numbers(row, where, not_negative=("lr", "weight_decay", "eps", "extent"))
        _check_number(row.multiplier, f"{where}: multiplier", row.multiplier != 0, "other than 0")
        _check_layout(row, where)
        _check_law(row.init, f"{where}: init")


def _check_law(law: Law, where: str) -> None:
    _check_numbers(law, where, not_negative=("std",), other=("mean", "factor"))
    if law.kind == "truncated" and law.bound is None:
        raise _Misfit(f"{where}: bound is None, and a truncated law needs one")
    if law.bound is not None:
        # No values within a bound have a larger std than those that are uniform.
        least = law.std * math.sqrt(3) * (1 - 1e-9) if law.kind == "truncated" else 0.0
        _check_number(law.bound, f"{where}: bound", law.bound >= max(least, 0.0), f"{least:.4g} or more")


def _check_layout(row: Row, where: str) -> None:
    for field in ("fan_in", "fan_out"):
        _check_number(getattr(row, field), f"{where}: {field}", getattr(row, field) >= 1, "1 or more")
    for length in row.shape:
        _check_number(length, f"{where}: shape", length >= 0, "0 or more in each dimension")
    axes = (*row.in_axes, *row.out_axes)
    if len(set(axes)) < len(axes) or not set(axes) <= set(range(len(row.shape))):
        raise _Misfit(
            f"{where}: in_axes and out_axes are {row.in_axes} and {row.out_axes}, which have to be different "
            f"dimensions of the shape {row.shape}"
        )
    outputs = math.prod(row.shape[axis] for axis in row.out_axes)
    for first, last in (pair for block in row.rows for pair in block):
        if not 0 <= first < last <= outputs:
            raise _Misfit(
                f"{where}: rows holds {(first, last)}, which has to be a range within {outputs} outputs"
            )


def _check_numbers(of: Any, where: str, *, not_negative: Sequence[str], other: Sequence[str] = ()) -> None:
    for field in (*not_negative, *other):
        value = getattr(of, field)
        _check_number(value, f"{where}: {field}", value >= 0 or field in other, "0 or more")


def _check_number(value: float, where: str, good: bool, wanted: str) -> None:
    if not good:
        raise _Misfit(f"{where} is {value!r}, which has to be {wanted}")
    if abs(value) > LARGEST:
        raise _Misfit(f"{where} is {_said(value)}, which is beyond what float32 can hold")


def _check_choice(value: str, where: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise _Misfit(f"{where} is {value!r}, which has to be one of {', '.join(choices)}")


def _stored(kind: type) -> dict[str, Any]:
    """The fields of a dataclass that a file holds, with their types."""
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind) if field.compare}


def _plain(value: Any, where: str) -> Any:
    """The value in the types of JSON; tuples become lists."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {name: _plain(getattr(value, name), f"{where}: {name}") for name in _stored(type(value))}
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{where}: {key}") for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item, where) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        raise UseError(f"{where} is {value}: only finite numbers can be saved")
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise UseError(f"{where} is a {type(value).__name__}: only numbers, texts and their lists can be saved")


def _read(hint: Any, value: Any, where: str) -> Any:
    """The value as what the type hint says; lists become tuples."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        assert isinstance(hint, type)
        return _read_fields(hint, value, where)
    if hint is Any:
        return _frozen(value, where)
    if origin is Literal:
        return value if value in arguments else _refuse(value, where, " or ".join(map(repr, arguments)))
    if origin in (typing.Union, types.UnionType):
        options = [option for option in arguments if option is not type(None)]
        return None if value is None else _read(options[0], value, where)
    if origin is tuple:
        items = value if isinstance(value, list) else _refuse(value, where, "a list")
        if len(arguments) == 2 and arguments[1] is not Ellipsis and len(items) != 2:
            _refuse(value, where, "a list of two")
        return tuple(_read(arguments[0], item, where) for item in items)
    if origin is not None:  # a mapping from names
        held = value if isinstance(value, dict) else _refuse(value, where, "an object")
        return {name: _read(arguments[1], item, f"{where}: {name}") for name, item in held.items()}
    if hint is bool:
        return value if isinstance(value, bool) else _refuse(value, where, "true or false")
    good = isinstance(value, int | float if hint is float else hint) and not isinstance(value, bool)
    if not good or (hint is float and not _is_finite(value)):
        _refuse(value, where, {float: "a finite number", int: "a whole number"}.get(hint, "a text"))
    return value


def _read_fields(kind: type, value: Any, where: str) -> Any:
    fields = _stored(kind)
    if not isinstance(value, dict):
        _refuse(value, where, "an object")
    if missing := [name for name in fields if name not in value]:
        raise _Misfit(f"{where} has no {' and no '.join(missing)}")
    if strange := [name for name in value if name not in fields]:
        raise _Misfit(f"{where} has a {strange[0]!r}, which means nothing")
    return kind(**{name: _read(hint, value[name], f"{where}: {name}") for name, hint in fields.items()})


def _frozen(value: Any, where: str) -> Any:
    if isinstance(value, dict):
        return {name: _frozen(item, f"{where}: {name}") for name, item in value.items()}
    if isinstance(value, list):
        return tuple(_frozen(item, where) for item in value)
    if isinstance(value, int | float) and not _is_finite(value):
        _refuse(value, where, "a finite number")
    return value


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number that no float can hold
        return False


def _refuse(value: Any, where: str, wanted: str) -> typing.NoReturn:
    raise _Misfit(f"{where} is {_said(value)} where {wanted} belongs")


def _said(value: Any) -> str:
    return "a number of many digits" if isinstance(value, int) and abs(value) > 10**18 else repr(value)
