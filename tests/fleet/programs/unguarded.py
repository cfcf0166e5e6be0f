"""Starts processes without `if __name__ == "__main__"`."""

from theodolite.fleet import pool

pool.PRELOADED = []  # the worker imports this file, and with it torch
print(list(pool.pooled(int, ["3"], 1)))
