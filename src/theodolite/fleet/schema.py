"""The tables of a ledger, as any tool that reads SQLite sees them."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from theodolite.errors import UseError

APPLICATION = 0x54484C47
"""`THLG` in the file's header: this is a ledger, not just any SQLite file."""
VERSION = 1
"""Of the tables. A ledger of a newer one is refused."""
FREE_PAGES = 8
"""How many pages of the file are unused, at least, when it was made longer."""

LATEST = "COALESCE(MAX(CASE WHEN status <> 'failed' THEN id END), MAX(id))"
"""Among the attempts at a run the one that counts."""

TABLES = """
-- What the study is. One row.
CREATE TABLE study (
    name TEXT NOT NULL,
    spec TEXT NOT NULL  -- JSON
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
    workload_source TEXT,  -- hash of the file that the workload is in
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
    ended TEXT NOT NULL,  -- UTC
    num_metrics INTEGER NOT NULL,
    num_readings INTEGER NOT NULL
);
CREATE INDEX attempts_of_run ON attempts (run);
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

-- Always empty. Its pages lie free at the end of the file, where a file that is cut short is cut.
CREATE TABLE slack (filler BLOB);

-- Of every run the attempt that counts: the one that settled it, else the last.
CREATE VIEW results AS
SELECT runs.*, attempts.id AS attempt, attempts.status, attempts.step, attempts.held_out, attempts.seconds,
    attempts.device, attempts.engine, attempts.error, attempts.ended, latest.attempts, attempts.environment
FROM runs
JOIN (
    SELECT run, COUNT(*) AS attempts,
        {latest} AS id
    FROM attempts GROUP BY run
) AS latest ON latest.run = runs.identity
JOIN attempts ON attempts.id = latest.id
"""

INCOMPLETE = """
SELECT 'attempt ' || id || ' is not whole' FROM attempts
WHERE num_metrics <> (SELECT COUNT(*) FROM metrics WHERE attempt = id)
    OR num_readings <> (SELECT COUNT(*) FROM readings WHERE attempt = id)
"""
KEPT = ("study", "runs", "environments", "attempts", "metrics", "readings")


def create(connection: sqlite3.Connection, name: str, spec: Mapping[str, Any]) -> None:
    """Make the tables in an empty file, inside the caller's transaction."""
    for statement in TABLES.format(latest=LATEST).split(";\n"):
        connection.execute(statement)
    for table in KEPT:
        for change in ("UPDATE", "DELETE"):
            connection.execute(
                f"CREATE TRIGGER {table}_{change.lower()} BEFORE {change} ON {table} "
                "BEGIN SELECT RAISE(ABORT, 'a ledger is only ever added to'); END"
            )
    connection.execute("INSERT INTO study VALUES (?, ?)", (name, json.dumps(spec)))
    connection.execute(f"PRAGMA application_id = {APPLICATION}")
    connection.execute(f"PRAGMA user_version = {VERSION}")


def is_empty(connection: sqlite3.Connection) -> bool:
    """Is it a file that nothing was written to yet, such as one whose driver was killed at once?"""
    return number(connection, "SELECT COUNT(*) FROM sqlite_master") == 0


def check(connection: sqlite3.Connection, path: Path) -> None:
    """Refuse what is not a ledger, or one that this version cannot know."""
    if number(connection, "PRAGMA application_id") != APPLICATION:
        raise UseError(f"{path} is a SQLite file of another program, not a ledger. Give another path")
    if (version := number(connection, "PRAGMA user_version")) > VERSION:
        raise UseError(
            f"{path} has tables of version {version}, and this Theodolite knows them up to {VERSION}. "
            "Install the newer Theodolite that wrote it"
        )


def faults(connection: sqlite3.Connection) -> list[str]:
    """What is wrong with the file: pages that do not fit together, or an attempt that is not whole."""
    for query in ("PRAGMA integrity_check(1)", "PRAGMA foreign_key_check", INCOMPLETE):
        found = [" ".join(map(str, row)) for row in connection.execute(query).fetchmany(3)]
        if found and found != ["ok"]:
            return found
    return []


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
