"""`workload`: find a workload by its name, file or config."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import os
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from theodolite.core.arguments import did_you_mean
from theodolite.core.building import in_one_line
from theodolite.core.errors import UseError
from theodolite.core.size import Size
from theodolite.workloads import diffusers_configs, hugging_face
from theodolite.workloads.builtin import built_in
from theodolite.workloads.configs import read_config
from theodolite.workloads.definition import Workload

CONFIGS = ("hf:", diffusers_configs.PREFIX)
"""Prefixes of workloads that are configs."""

_folders: set[Path] = set()
"""The folders of the files that were looked up in this process."""


def workload(spec: str) -> Workload:
    """Find a workload.

    Args:
        spec: one of

            - the name of a built-in workload: `gpt-sotu`;
            - `path/to/file.py:name`, a `Workload` in your file, or a function without arguments that returns
              one. As with `python file.py`, modules in the folder of the file come before installed ones,
              also when `build` imports them later. If two files have a `helper.py` each, each imports its
              own. A function that imports one when it is called gets that of the file looked up last, but in
              a run that of its own file;
            - `hf:path/to/config.json`, a model of transformers, or the folder of its config;
            - `diffusers:path/to/config.json`, a model of diffusers, the folder of its config, or that of a
              pipeline.

    >>> workload("mlp-mixture").name
    'mlp-mixture'
    >>> workload("mlp-mixtures")
    Traceback (most recent call last):
    theodolite.UseError: there is no workload 'mlp-mixtures'. Did you mean 'mlp-mixture'? Built in ...
    """
    if not isinstance(spec, str):
        raise UseError(f"a workload is looked up by a string such as 'gpt-sotu', not by {_a(spec)}")
    if spec.startswith("hf:"):
        return hugging_face.hugging_face(spec.removeprefix("hf:"))
    if spec.startswith(diffusers_configs.PREFIX):
        return diffusers_configs.diffusers_config(spec.removeprefix(diffusers_configs.PREFIX))
    file, colon, name = spec.rpartition(":")
    if colon and file.endswith(".py"):
        return _from_file(Path(file).expanduser(), name)
    if spec.endswith(".py"):
        raise UseError(f"{spec} names a file but no workload in it: write {spec}:name")
    known = built_in()
    if spec in known:
        return known[spec]
    guess = did_you_mean(spec, known)
    raise UseError(
        f"there is no workload {spec!r}.{guess} Built in are {', '.join(known)}; yours is "
        "path/to/file.py:name, a config of transformers is hf:path/to/config.json, one of diffusers "
        "diffusers:path/to/config.json"
    )


def function_in_file(spec: str, option: str) -> Any:
    """A function in a Python file of the user's, `path/to/file.py:name`; `option` names it in errors.

    >>> function_in_file("make_optimizer", "--optimizer")
    Traceback (most recent call last):
    theodolite.UseError: --optimizer is 'make_optimizer': write path/to/file.py:name
    """
    path, colon, name = spec.rpartition(":")
    if not colon or not path.endswith(".py"):
        raise UseError(f"{option} is {spec!r}: write path/to/file.py:name")
    file = Path(path).expanduser()
    module = _import(file)
    found = getattr(module, name, None)
    if callable(found):
        return found
    if found is not None:
        raise UseError(f"{option}: {name} in {file} is {_a(found)}, which cannot be called")
    there = [key for key, value in vars(module).items() if inspect.isfunction(value)]
    guess = did_you_mean(name, there) or (f" Its functions are {', '.join(there)}" if there else "")
    raise UseError(f"{option}: {file} has no {name!r}.{guess}")


def config_size(path: str | Path) -> Size:
    """The size of the model that a config of transformers or of diffusers describes."""
    file = diffusers_configs.find_file(path)
    kind = diffusers_configs if file.is_file() and "_class_name" in read_config(file) else hugging_face
    return kind.config_size(path)


def config_file(spec: str) -> Path | None:
    """The file of a workload that is a config; None for another workload, or if there is no such file.

    >>> config_file("hf:nowhere.json"), config_file("gpt-sotu")
    (None, None)
    """
    prefix = next((one for one in CONFIGS if spec.startswith(one)), None)
    if prefix is None:
        return None
    file = diffusers_configs.find_file(spec.removeprefix(prefix))
    return file if file.is_file() else None


def put_neighbours_first(spec: str) -> None:
    """Let functions of a workload's file import modules of its folder, not of the folder of another file."""
    file, colon, _ = spec.rpartition(":")
    folder = Path(file).expanduser().resolve().parent
    if colon and file.endswith(".py") and folder.is_dir():
        _put_first(folder)


def _from_file(file: Path, name: str) -> Workload:
    module = _import(file)
    if not hasattr(module, name):
        there = [key for key, value in vars(module).items() if isinstance(value, Workload)]
        listed = f"Its workloads are {', '.join(there)}" if there else "It has no Workload at all"
        raise UseError(f"{file} has no {name!r}. {listed}")
    found = getattr(module, name)
    if isinstance(found, Workload):
        return found
    if not callable(found):
        raise UseError(f"{file}: {name} is {_a(found)}, neither a Workload nor a function that returns one")
    try:
        made = found()
    except UseError:
        raise
    except Exception as error:
        raise UseError(f"{file}: {name}() failed: {_with_line(error, file)}") from error
    if not isinstance(made, Workload):
        raise UseError(f"{file}: {name}() returned {_a(made)}, not a Workload")
    return made


def _import(file: Path) -> ModuleType:
    if not file.is_file():
        raise UseError(f"{file} is not there (looked for {file.absolute()})")
    unique = hashlib.sha256(os.fsencode(file.resolve())).hexdigest()[:12]
    spec = importlib.util.spec_from_file_location(f"theodolite_user_{file.stem}_{unique}", file.absolute())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    _put_first(file.resolve().parent)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[spec.name]
        raise UseError(f"{file} could not be imported: {_with_line(error, file)}") from error
    return module


def _put_first(folder: Path) -> None:
    """Put a folder first on the import path, and forget modules of equal names from other such folders."""
    names, others = {entry.stem for entry in folder.iterdir()}, _folders - {folder}
    for name, module in list(sys.modules.items()) if others else ():
        if (top := name.partition(".")[0]) not in names:
            continue
        file = getattr(module, "__dict__", {}).get("__file__")
        if file and any(_is_beside(Path(file), top, old) for old in others):
            del sys.modules[name]
    _folders.add(folder)
    sys.path[:] = [str(folder), *(entry for entry in sys.path if entry != str(folder))]


def _is_beside(file: Path, top: str, folder: Path) -> bool:
    return file == folder / f"{top}.py" or file.is_relative_to(folder / top)


def _with_line(error: BaseException, file: Path) -> str:
    """The error, and the last line of the user's file in its traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if Path(frame.filename) == file.absolute()]
    return f"{in_one_line(error)} (line {lines[-1]})" if lines else in_one_line(error)


def _a(value: object) -> str:
    kind = type(value).__name__
    return f"{'an' if kind[0] in 'aeiouAEIOU' else 'a'} {kind}"
