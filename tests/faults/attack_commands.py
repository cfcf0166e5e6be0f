"""Command lines with values that nobody should give, on files that nobody should have.

Each starts from a line that works. One or two of the options and arguments that the command really has get a
value from a list of bad ones: wrong numbers, names that are too long, folders in place of files, pipes, and
files of another kind.
"""

from __future__ import annotations

import contextlib
import gzip
import inspect
import io
import json
import os
import random
import shutil
import signal
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal, get_args, get_origin, get_type_hints
from unittest import mock

import typer

from theodolite.cli import app, main
from theodolite.commands.study import installed

from .attack import Attack

PATIENCE = 60
"""Seconds after which a line is called endless; all of them take less than one."""
WORKLOAD = """
import torch
from torch import nn
from theodolite import Size, Workload

class Net(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.first, self.last = nn.Linear(4, width), nn.Linear(width, 2)
        self.up = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.down = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x):
        x = self.first(x)
        for up, down in zip(self.up, self.down):
            x = x + down(up(x).relu())
        return self.last(x)

def batch(seed, step):
    inputs = torch.randn(4, 4, generator=torch.Generator().manual_seed(seed + step))
    return inputs, (inputs.sum(1) > 0).long()

net = Workload("net", Net, batch, nn.functional.cross_entropy, Size(4, 1))
"""
LINES: dict[str, dict[str, list[str]]] = {
    "survey": {"workload": ["w.py:net"], "only": ["norms"], "out": ["new.html"]},
    "dissect": {"workload": ["w.py:net"]},
    "plan": {"workload": ["w.py:net"], "width": ["8"], "lr": ["0.1"], "out": ["new.json"]},
    "lr": {
        "workload": ["w.py:net"],
        "seeds": ["1"],
        "steps": ["1"],
        "low": ["0.01"],
        "high": ["0.1"],
        "out": ["new.html"],
    },
    "sweep": {
        "workload": ["w.py:net"],
        "lr": ["0.1"],
        "steps": ["1"],
        "seeds": ["1"],
        "held_out": ["1"],
        "parameterization": ["standard"],
        "engine": ["serial"],
        "out": ["new"],
    },
    "grow": {
        "checkpoint": ["w.safetensors"],
        "workload": ["w.py:net"],
        "examples": ["24"],
        "out": ["new.html"],
        "write": ["new.safetensors"],
    },
    "fit": {
        "file": ["runs.csv"],
        "form": ["power"],
        "columns": ["x=tokens"],
        "draws": ["20"],
        "out": ["new.html"],
    },
    "data list": {},
    "data fetch": {"names": ["sotu"]},
    "data path": {"name": ["sotu"]},
    "ledger show": {"path": ["ledger"]},
    "ledger export": {"path": ["ledger"], "to": ["new.csv"]},
    "ledger import": {"source": ["ledger.csv"], "path": ["new"]},
    "ledger salvage": {"damaged": ["ledger"], "path": ["new"]},
}
"""By command, a line that works. Those of studies are `--small`, and end where their work would begin."""
BEGINNINGS = ("pooled", "conduct_runs")
"""In the framework of studies: where their work would begin."""
SUFFIXES = {
    "records": ".jsonl",
    "summary": ".jsonl",
    "data": ".safetensors",
    "certify": ".safetensors",
    "diff": ".json",
}
"""Of files that an option is for, where no line above has it."""
LONG = "x" * 300
WHOLE = ["0", "-1", "999999999999", "1e3", "", "x", "9" * 5000, "nan"]
REAL = ["0", "-1", "nan", "inf", "-inf", "1e400", "1e308", "1e-320", "", "x"]
TEXT = [
    "",
    " ",
    "x",
    LONG,
    "x" * 5000,
    "\udcff",
    "=",
    "a=b",
    "a=",
    ",",
    "a,b",
    "[" * 9999,
    "[1",
    "🦊",
    "nan",
    "-1",
]
TEXT += [
    "../..",
    "~nouser",
    "~nouser/w.py:net",
    "w.py:",
    ":",
    "w.py:missing",
    "hf:",
    "hf:deep.json",
    "hf:w.py",
]
TEXT += [
    "hf:config.json",
    "cuda:99",
    "cuda",
    "cpu:7",
    "cpu:-1",
    "meta",
    "mps",
    "1:2:3:4",
    "2^9999",
    "1e9:1",
    "a\nb",
]
PATHS = ["", ".", "..", "/", LONG, "x/" * 3000, "~nouser/x.html", "no/such/x.html", "folder", "folder.html"]
PATHS += [
    "w.py/x.html",
    "w.py",
    "loop.html",
    "loop",
    "pipe.html",
    "pipe.csv",
    "pipe",
    "\udcff.html",
    "a\nb.html",
]
PATHS += [
    "/dev/null",
    "/proc/x.html",
    f"{LONG}.html",
    f"{LONG}.csv",
    f"{LONG}.sqlite",
    f"{LONG}/x.json",
    "x.pickle",
]
PATHS += [
    "~nouser",
    "~nouser/x.safetensors",
    "~nouser/new.csv",
    "w.py/new",
    "ledger",
    "ledger.csv",
    "deep.html",
]


@dataclass(frozen=True)
class Given:
    """An argument or an option of a command."""

    name: str
    flag: str
    """Empty for an argument."""
    kind: object
    """bool, int, float, Path, str, or the choices."""


def _commands(group: typer.Typer, name: str = "") -> Iterator[tuple[str, list[Given]]]:
    """Every command by its name, with all that it can be given."""
    for command in group.registered_commands:
        assert command.callback is not None
        hints = get_type_hints(command.callback, include_extras=True)
        given = [_given(each, hint) for each, hint in hints.items() if each != "return"]
        yield f"{name} {command.name or command.callback.__name__}".strip(), given
    for inner in group.registered_groups:
        assert inner.typer_instance is not None
        yield from _commands(inner.typer_instance, f"{name} {inner.name}".strip())
    if not name:
        for study, entry in installed().items():
            parameters = inspect.signature(entry.load()).parameters.values()
            yield f"study {study}", [_given(each.name, each.annotation) for each in parameters]


def _given(name: str, hint: Any) -> Given:
    kind, about = get_args(hint)[:2]
    while get_args(kind) and get_origin(kind) is not Literal:  # of list[str] | None the str
        kind = get_args(kind)[0]
    is_option = isinstance(about, typer.models.OptionInfo)
    flag = next(iter(about.param_decls or ()), f"--{name.replace('_', '-')}") if is_option else ""
    return Given(name, flag, get_args(kind) or kind)


def _files(folder: Path) -> None:
    """Good files, and what nobody should have."""
    import torch
    from safetensors.torch import save_file

    from theodolite.core.size import Size
    from theodolite.fleet.ledger import Ledger
    from theodolite.fleet.run import Outcome, Run

    (folder / "w.py").write_text(WORKLOAD)
    (folder / "runs.csv").write_text("tokens,loss\n" + "".join(f"{10**n},{1 + 2.0**-n}\n" for n in range(6)))
    names = {}
    exec(WORKLOAD, names)
    torch.manual_seed(0)
    state = names["Net"](4, 1).state_dict()
    save_file(state, folder / "w.safetensors")
    run = Run("w.py:net", Size(4, 1), 0.1, parameterization="standard")
    with Ledger.open(folder / "ledger", name="runs", spec={}) as ledger:
        ledger.append(Outcome(run, "finished", 100, 1.0))
        ledger.export(folder / "ledger.csv")
    deep = "[" * 200_000
    about = {
        "deep": deep,
        "list": "[]",
        "odd": '{"width": "x", "inserted": 3}',
        "large": '{"depth": 999999999999}',
    }
    for name, text in about.items():
        save_file(state, folder / f"{name}.safetensors", {"theodolite": text})
    save_file({"inputs": torch.zeros(3, 4)}, folder / "half.safetensors")
    save_file({"inputs": torch.zeros(()), "targets": torch.zeros(())}, folder / "flat.safetensors")
    save_file(
        {"inputs": torch.full((40, 4), torch.nan), "targets": torch.zeros(40).long()},
        folder / "nan.safetensors",
    )
    save_file({"inputs": torch.zeros(40, 9), "targets": torch.zeros(40)}, folder / "other.safetensors")
    header = json.dumps({"a": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}).encode()
    (folder / "lie.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    (folder / "length.safetensors").write_bytes(b"\xff" * 16)
    binary = bytes(random.Random(0).randrange(256) for _ in range(4000))
    packed = gzip.compress(bytes(10_000_000))
    for kind in ("json", "jsonl", "csv", "parquet", "sqlite", "safetensors", "html", "txt", "py"):
        (folder / f"binary.{kind}").write_bytes(binary)
        (folder / f"empty.{kind}").touch()
        (folder / f"packed.{kind}").write_bytes(packed)
    (folder / "deep.json").write_text(deep)
    (folder / "deep.jsonl").write_text(f"{deep}\n{deep}\n")
    (folder / "huge.json").write_text(f'{{"model_type": "gpt2", "n_layer": {"9" * 5000}}}')
    (folder / "config.json").write_text('{"model_type": "gpt2", "n_layer": -1, "n_embd": "x"}')
    plan = {"kind": "theodolite plan", "version": 2}
    (folder / "plan.json").write_text(json.dumps({**plan, "rows": deep[:100]}))
    for study in (
        "ghosts",
        "lion",
        "growing",
        "coordinates",
        "goldilocks",
        "depth-expansion",
        "norm-placement",
    ):
        (folder / f"{study}.jsonl").write_text(json.dumps({"study": study}) + '\n{"seed": 0, "x": null}\n')
    tables = {
        "ragged": "tokens,loss\n1,2,3\n4\n",
        "words": "tokens,loss\na,b\nc,d\n",
        "nan": "tokens,loss\n" + "nan,inf\n" * 6,
        "large": "tokens,loss\n1e308,1e308\n1e-308,1e-308\n1,1\n2,2\n",
        "twice": "loss,loss\n1,2\n3,4\n",
        "zero": "tokens,loss\n\0,1\n",
        "wide": "tokens,loss\n" + '"' + "x" * 200_000 + '",1\n',
        "same": "tokens,loss\n" + "1,1\n" * 8,
    }
    for name, text in tables.items():
        (folder / f"{name}.csv").write_text(text)
    (folder / "folder").mkdir()
    for name in ("folder.html", "folder.csv", "folder.json", "folder.jsonl", "folder.safetensors"):
        (folder / name).mkdir()
    for name in ("loop", "loop.html", "loop.csv", "loop.json", "loop.jsonl"):
        (folder / name).symlink_to(name)
    for name in (
        "pipe",
        "pipe.html",
        "pipe.csv",
        "pipe.json",
        "pipe.jsonl",
        "pipe.safetensors",
        "pipe.sqlite",
    ):
        os.mkfifo(folder / name)


def _values(given: Given, usual: list[str], files: list[str], chance: random.Random) -> list[str]:
    if isinstance(given.kind, tuple):
        return ["", "x", LONG, *given.kind]
    if given.kind is Path and chance.random() < 0.6:  # of the kind that is expected
        kind = SUFFIXES.get(given.name) or Path(*usual).suffix
        return [name for name in files if name.endswith(kind)]
    known: dict[object, list[str]] = {int: WHOLE, float: REAL, str: TEXT, Path: [*PATHS, *files]}
    return known[given.kind]


def _line(
    all_: list[Given], base: dict[str, list[str]], files: list[str], chance: random.Random
) -> list[str]:
    """Arguments and options of a command, one or two of them wrong."""
    line = dict(base)
    for given in chance.sample(all_, min(len(all_), chance.choice([1, 1, 1, 2]))):
        line[given.name] = (
            []
            if given.kind is bool
            else [chance.choice(_values(given, base.get(given.name, []), files, chance))]
        )
    options = [
        given.flag if given.kind is bool else f"{given.flag}={value}"
        for given in all_
        if given.flag and given.name in line
        for value in line[given.name] or [""]
    ]
    arguments = [value for given in all_ if not given.flag for value in line.get(given.name, ())]
    return [*options, "--", *arguments] if arguments else options


def _listing(folder: Path) -> dict[str, tuple[int, int]]:
    return {
        str(path.relative_to(folder)): (
            path.lstat().st_size,
            path.lstat().st_mtime_ns if not path.is_dir() else 0,
        )
        for path in folder.rglob("*")
    }


@contextlib.contextmanager
def _set_up(folder: Path) -> Iterator[None]:
    """In a folder with the files, without network, with studies that end where work would begin."""

    def endless(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"not at an end after {PATIENCE} s")

    def begun(*arguments: object, **options: object) -> None:
        raise SystemExit(0)

    there = {
        "THEODOLITE_DATA": str(folder.parent / "data"),
        "PATH": "",
        "COLUMNS": "120",
        "HF_HUB_OFFLINE": "1",
    }
    before, bytecode = signal.signal(signal.SIGALRM, endless), sys.dont_write_bytecode
    sys.dont_write_bytecode = True
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.chdir(folder))
        stack.enter_context(mock.patch.dict(os.environ, there))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        for name in BEGINNINGS:
            stack.enter_context(mock.patch(f"theodolite_studies.framework.study.{name}", begun))
        stack.callback(signal.signal, signal.SIGALRM, before)
        stack.callback(setattr, sys, "dont_write_bytecode", bytecode)
        stack.callback(signal.alarm, 0)
        yield


def _tried(words: list[str], folder: Path, there: dict[str, tuple[int, int]]) -> str | None:
    """What is wrong with the end of a command line."""
    said, code = (io.StringIO(), io.StringIO()), None
    shown = " ".join(repr(word[:60]) for word in words)
    signal.alarm(PATIENCE)
    try:
        with contextlib.redirect_stdout(said[0]), contextlib.redirect_stderr(said[1]):
            main(words)
    except SystemExit as left:
        code = left.code or 0
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return f"{shown}: {type(error).__name__}: {str(error)[:200]}"
    finally:
        signal.alarm(0)
        after = _listing(folder)
        changed = sorted(name for name in {*after, *there} if after.get(name) != there.get(name))
        for name in changed:
            if name not in there and (path := folder / name).is_dir():
                shutil.rmtree(path)
            elif name not in there:
                path.unlink(missing_ok=True)
    message = said[1].getvalue()
    if code not in (0, 1, 2):
        return f"{shown}: exit status {code}"
    if "Traceback" in message:
        return f"{shown}: a traceback"
    if code == 2:
        if changed:
            return f"{shown}: left {changed[:3]} behind"
        if message.startswith("Usage:"):  # typer's own
            return None
        if message.count("\n") != 1 or not message.startswith("theodolite: "):
            return f"{shown}: not one line: {message[:300]!r}"
        if len(message) > 1500:
            return f"{shown}: a line of {len(message)} characters: {message[:200]!r}"
    return None


def fuzzed(count: int, folder: Path) -> Iterator[str | None]:
    work = folder / "work"
    work.mkdir()
    _files(work)
    files = sorted(path.name for path in work.iterdir())
    commands = [(name, all_) for name, all_ in _commands(app) for _ in range(1 if " " in name else 4)]
    with _set_up(work):
        for number in range(count):
            chance = random.Random(number)
            name, all_ = chance.choice(commands)
            base = LINES.get(name, {"out": ["new.jsonl"], "small": []})
            words = _line(all_, base, files, chance)
            there = _listing(work)
            yield _tried([*name.split(), *words], work, there)
            if _listing(work) != there:
                for path in work.iterdir():
                    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
                _files(work)


ATTACKS = [
    Attack(
        title="a command line has wrong values, or names hostile files",
        promise="exit status 0, 1 or 2; an error is one line, without a traceback, and leaves nothing behind",
        tries=fuzzed,
        few=25,
        many=2000,
    ),
]
