"""The tables of a ledger, as any tool that reads SQLite sees them."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from theodolite.core.errors import UseError
from theodolite.core.files import plain_text
from theodolite.fleet.digest import digest_of

APPLICATION = 0x54484C47
"""`THLG` in the file's header: this is a ledger, not just any SQLite file."""
VERSION = 2
"""Of the definitions below. A change of one, other than of a comment, takes a new number: a ledger whose
definitions are not those of its version is damaged."""
FREE_PAGES = 8
"""How many pages of the file are unused, at least, when it was made longer."""

TABLES = """
-- What the study is. One row.
CREATE TABLE study (
    name TEXT NOT NULL,
    spec TEXT NOT NULL,  -- JSON
    digest TEXT NOT NULL  -- SHA-256 of name and spec
);

-- Every run that was tried: its value, whose hash is its identity, and the common fields of it.
CREATE TABLE runs (
    identity TEXT NOT NULL PRIMARY KEY,
    spec TEXT NOT NULL,  -- JSON
    workload TEXT, width INTEGER, depth INTEGER, base_width INTEGER, base_depth INTEGER,
    optimizer TEXT, parameterization TEXT, lr REAL, weight_decay REAL, seed INTEGER, steps INTEGER
);

-- With what attempts were made.
CREATE TABLE environments (
    identity TEXT NOT NULL PRIMARY KEY,
    theodolite TEXT,
    source TEXT,  -- hash of the package's files
    workload_source TEXT,  -- hash of the workload's file and modules beside it
    python TEXT, torch TEXT, numpy TEXT, platform TEXT
);

-- Every attempt at a run, in the order in which they ended. A run may fail often, and settles once.
CREATE TABLE attempts (
    id INTEGER NOT NULL PRIMARY KEY,
    run TEXT NOT NULL REFERENCES runs (identity),
    environment TEXT NOT NULL REFERENCES environments (identity),
    status TEXT NOT NULL CHECK (status IN ('finished', 'diverged', 'failed')),
    step INTEGER NOT NULL,
    held_out REAL,
    seconds REAL NOT NULL,
    device TEXT NOT NULL,
    engine TEXT NOT NULL,
    error TEXT,
    ended TEXT NOT NULL  -- UTC
);
CREATE UNIQUE INDEX settles_once ON attempts (run) WHERE status <> 'failed';

-- What was recorded by step. NULL is not a number (NaN); infinity is infinity.
CREATE TABLE metrics (
    attempt INTEGER NOT NULL REFERENCES attempts (id),
    name TEXT NOT NULL,
    step INTEGER NOT NULL,
    value REAL,
    PRIMARY KEY (attempt, name, step)
) WITHOUT ROWID;

-- What was measured once.
CREATE TABLE readings (
    attempt INTEGER NOT NULL REFERENCES attempts (id),
    name TEXT NOT NULL,
    value TEXT NOT NULL,  -- JSON
    PRIMARY KEY (attempt, name)
) WITHOUT ROWID;

-- SHA-256 digests of every attempt. A table of its own, so that an attempt that is gone is missed.
CREATE TABLE digests (
    attempt INTEGER NOT NULL PRIMARY KEY REFERENCES attempts (id),
    run TEXT NOT NULL,
    content TEXT NOT NULL,  -- of run, environment, values, readings and the digest of the metrics
    metrics TEXT NOT NULL
);

-- Always empty. Its pages lie free at the end of the file, where a file that is cut short is cut.
CREATE TABLE slack (filler BLOB);

-- Of every run the attempt that counts: the one that settled it, else the last.
CREATE VIEW results AS
SELECT runs.*, attempts.id AS attempt, attempts.status, attempts.step, attempts.held_out, attempts.seconds,
    attempts.device, attempts.engine, attempts.error, attempts.ended, latest.attempts, attempts.environment
FROM runs
JOIN (
    SELECT run, COUNT(*) AS attempts,
        COALESCE(MAX(CASE WHEN status <> 'failed' THEN id END), MAX(id)) AS id
    FROM attempts GROUP BY run
) AS latest ON latest.run = runs.identity
JOIN attempts ON attempts.id = latest.id
"""

KEPT = ("study", "runs", "environments", "attempts", "metrics", "readings", "digests")


def create(connection: sqlite3.Connection, name: str, spec: Mapping[str, Any]) -> None:
    """Make the tables in an empty file, inside the caller's transaction."""
    for statement in TABLES.split(";\n"):
        connection.execute(statement)
    for table in KEPT:
        for change in ("UPDATE", "DELETE"):
            connection.execute(
                f"CREATE TRIGGER {table}_{change.lower()} BEFORE {change} ON {table} "
                "BEGIN SELECT RAISE(ABORT, 'a ledger is only ever added to'); END"
            )
    study = plain_text(name), json.dumps(spec)
    connection.execute("INSERT INTO study VALUES (?, ?, ?)", (*study, digest_of(study)))
    connection.execute(f"PRAGMA application_id = {APPLICATION}")
    connection.execute(f"PRAGMA user_version = {VERSION}")


def study_of(connection: sqlite3.Connection) -> tuple[str, dict[str, Any]]:
    """Name and spec of the study."""
    try:
        name, spec, digest = connection.execute("SELECT name, spec, digest FROM study").fetchone()
        if digest_of((name, spec)) == digest:
            return name, json.loads(spec)
    except (TypeError, ValueError):  # no line, or no text in it
        pass
    raise damage("the name and the spec of its study are not as they were written")


def is_empty(connection: sqlite3.Connection) -> bool:
    """Is it a file that nothing was written to yet, such as one whose driver was killed at once?"""
    tables = number(connection, "SELECT COUNT(*) FROM sqlite_master")
    return tables == 0 and number(connection, "PRAGMA application_id") == 0


def check(connection: sqlite3.Connection, path: Path) -> None:
    """Refuse what is not a ledger, or one that this version cannot know."""
    if number(connection, "PRAGMA application_id") != APPLICATION:
        raise UseError(f"{path} is a SQLite file of another program, not a ledger. Give another path")
    if (version := number(connection, "PRAGMA user_version")) != VERSION:
        raise UseError(
            f"{path} has tables of version {version}, and this Theodolite knows version {VERSION}. "
            "Read it with the Theodolite that wrote it, or give another path and make its runs again"
        )
    if missing := _objects_as_created() - _objects(connection):
        raise damage(f"{min(missing)[1]} is not defined as it was")


def check_pages(connection: sqlite3.Connection) -> None:
    """Look for pages that do not fit together, and for an index that does not fit its table."""
    (found,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
    if found != "ok":
        raise damage(" ".join(found.split()))


def damage(found: str) -> sqlite3.DatabaseError:
    """An error such as SQLite raises for a damaged file."""
    error = sqlite3.DatabaseError(found)
    error.sqlite_errorname = "SQLITE_CORRUPT"
    return error


def keep_the_end_free(connection: sqlite3.Connection, before: tuple[int, int]) -> None:
    """Let the last pages of the file be unused ones, so that cutting them off loses nothing.

    A blob that takes all free pages and at least one new one, put in and taken out, leaves the new ones free,
    and they are the last. SQLite never looks into a free page. A transaction that took no page, as `pages`
    from before it shows, has left the end as it was. One that took some found them among the free ones, so
    the file does not grow by this.
    """
    if pages(connection) == before:
        return
    _, free = pages(connection)
    size = max(free + 1, FREE_PAGES) * number(connection, "PRAGMA page_size")
    connection.execute("INSERT INTO slack VALUES (zeroblob(?))", (size,))
    connection.execute("DELETE FROM slack")


def pages(connection: sqlite3.Connection) -> tuple[int, int]:
    """How many pages the file has, and how many of them are free."""
    return number(connection, "PRAGMA page_count"), number(connection, "PRAGMA freelist_count")


def number(connection: sqlite3.Connection, query: str) -> int:
    """What a query for one whole number gives."""
    (value,) = connection.execute(query).fetchone()
    return int(value)


Objects = frozenset[tuple[str, str, str]]


@functools.cache
def _objects_as_created() -> Objects:
    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        create(connection, "", {})
        return _objects(connection)


def _objects(connection: sqlite3.Connection) -> Objects:
    """The definitions of tables, indexes, triggers and the view. One letter of a view makes other numbers."""
    found = connection.execute("SELECT type, name, COALESCE(sql, '') FROM sqlite_master").fetchall()
    return frozenset((kind, name, _uncommented(str(sql))) for kind, name, sql in found)


def _uncommented(sql: str) -> str:
    return " ".join(re.sub("--.*", "", sql).split())
