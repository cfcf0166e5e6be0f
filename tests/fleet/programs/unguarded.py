"""Starts processes without `if __name__ == "__main__"`."""

from theodolite.fleet.pool import pooled

print(list(pooled(int, ["3"], 1)))
