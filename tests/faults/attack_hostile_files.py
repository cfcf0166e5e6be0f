"""Files that are read, with a piece cut out, changed, or put in; and what is packed without end."""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import json
import lzma
import os
import random
import struct
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import theodolite as th
from theodolite.data.files import read
from theodolite.data.images import decode_idx, decode_png
from theodolite.data.sources import File

from .attack import Attack
from .attack_commands import WORKLOAD

HOSTILE = [b"", b"\0", b"\xff" * 64, b"[" * 100_000, b'{"a":' * 50_000, b"9" * 10_000, b"NaN", b"null", b"-1"]
HOSTILE += [b"\r\n", b'"', b"1e999", b"\\ud800", b"\xed\xa0\x80", b"{}", b"[]", b"true", b'"x"']


def _changed(content: bytes, chance: random.Random) -> bytes:
    """One to three pieces of it are others."""
    for _ in range(chance.choice([1, 1, 2, 3])):
        start = chance.randrange(len(content) + 1)
        stop = min(len(content), start + chance.choice([0, 1, 1, 4, 50]))
        piece = chance.choice([*HOSTILE, bytes([chance.randrange(256)])])
        content = content[:start] + piece + content[stop:]
    return content[: chance.randrange(len(content) + 1)] if chance.random() < 0.2 else content


def _png() -> bytes:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 2, 1, 8, 2, 0, 0, 0))
    rows = chunk(b"IDAT", zlib.compress(bytes([1, 10, 20, 30, 1, 1, 255])))
    return b"\x89PNG\r\n\x1a\n" + header + rows + chunk(b"IEND", b"")


def _read_ledger(path: Path) -> None:
    from theodolite.fleet.ledger import Ledger

    with Ledger.read(path) as ledger:
        ledger.rows()


def _import(path: Path) -> None:
    from theodolite.fleet.exporting import read_exported

    for _ in read_exported(path)[2]:
        pass


def _kinds(folder: Path) -> dict[str, tuple[bytes, Callable[[Path], Any]]]:
    """By the name of a file, a whole one and who reads it."""
    import torch
    from safetensors.torch import save_file

    from theodolite.fits.fitting import read as read_table
    from theodolite.fleet.ledger import Ledger
    from theodolite.fleet.run import Outcome, Run
    from theodolite.growing import load_file
    from theodolite_studies.framework.records import read_records

    names: dict[str, Any] = {}
    exec(WORKLOAD, names)
    torch.manual_seed(0)
    net = names["Net"](4, 1)
    about = {"workload": "w.py:net", "width": 4, "depth": 1, "inserted": []}
    save_file(net.state_dict(), folder / "w.safetensors", {"theodolite": json.dumps(about)})
    plan = th.plan(names["Net"], torch.zeros(2, 4), size=th.Size(8, 1), base=th.Size(4, 1), lr=0.1)
    plan.save(folder / "plan.json")
    with Ledger.open(folder / "runs.sqlite", name="runs", spec={}) as ledger:
        ledger.append(
            Outcome(Run("w.py:net", th.Size(4, 1), 0.1, parameterization="standard"), "finished", 9, 1.0)
        )
        ledger.export(folder / "attempts.csv")
    config = {"model_type": "gpt2", "n_layer": 1, "n_embd": 4, "n_head": 1, "vocab_size": 8, "n_positions": 8}
    kinds: dict[str, tuple[bytes, Callable[[Path], Any]]] = {
        "plan.json": ((folder / "plan.json").read_bytes(), th.Plan.load),
        "w.safetensors": (
            (folder / "w.safetensors").read_bytes(),
            lambda path: load_file(path, names["net"]),
        ),
        "runs.sqlite": ((folder / "runs.sqlite").read_bytes(), _read_ledger),
        "attempts.csv": ((folder / "attempts.csv").read_bytes(), _import),
        "table.csv": (b"tokens,loss\n1,2\n3,4\n5,6\n", read_table),
        "records.jsonl": (b'{"study": "lion"}\n{"seed": 0}\n', read_records),
        "image.png": (_png(), lambda path: decode_png(path.read_bytes())),
        "image.idx": (
            bytes([0, 0, 8, 2, 0, 0, 0, 1, 0, 0, 0, 3, 7, 8, 9]),
            lambda path: decode_idx(path.read_bytes()),
        ),
    }
    if importlib.util.find_spec("transformers"):
        kinds["config.json"] = (json.dumps(config).encode(), lambda path: th.workload(f"hf:{path}"))
    return kinds


def changed_files(count: int, folder: Path) -> Iterator[str | None]:
    kinds = _kinds(folder)
    for number in range(count):
        chance = random.Random(number)
        name = list(kinds)[number % len(kinds)]
        content, reader = kinds[name]
        (place := folder / f"{number}").mkdir()
        file = place / name
        file.write_bytes(_changed(content, chance))
        try:
            reader(file)
        except th.UseError as error:
            yield None if str(error).strip() else f"{name}: an error without a word"
        except Exception as error:
            yield f"{name}: {type(error).__name__}: {str(error)[:200]}"
        else:
            yield None


def bombs(count: int, folder: Path) -> Iterator[str | None]:
    """Zeros, packed in a few kilobytes, in place of a data set of known size."""
    zeros = bytes(1_000_000)
    for number in range(count):
        suffix = (".gz", ".xz", ".zip", "")[number % 4]
        millions = 16 * (1 + number // 4)
        wanted = File(f"bomb{number}", 1000 * (number + 1), hashlib.sha256(b"").hexdigest())
        bomb = folder / f"{wanted.name}{suffix}"
        if suffix == ".zip":
            with (
                zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive,
                archive.open(wanted.name, "w") as out,
            ):
                for _ in range(millions):
                    out.write(zeros)
        elif suffix:
            with (gzip if suffix == ".gz" else lzma).open(bomb, "wb") as stream:
                for _ in range(millions):
                    stream.write(zeros)
        else:
            with bomb.open("wb") as stream:
                stream.truncate(millions * 1_000_000)
        tracemalloc.start()
        try:
            read(folder, wanted)
            fault: str | None = "taken for the data set"
        except th.UseError:
            most = tracemalloc.get_traced_memory()[1]
            fault = None if most < 10_000_000 else f"{suffix}: {most} bytes were held for {wanted.size}"
        finally:
            tracemalloc.stop()
            os.unlink(bomb)
        yield fault


ATTACKS = [
    Attack(
        title="a plan, checkpoint, ledger, table, config or image is changed in places, or cut short",
        promise="read, or refused by an error of use; no other exception",
        tries=changed_files,
        few=27,
        many=3000,
    ),
    Attack(
        title="a packed data set holds far more than it should",
        promise="refused, with memory for its known size alone",
        tries=bombs,
        few=4,
        many=40,
    ),
]
