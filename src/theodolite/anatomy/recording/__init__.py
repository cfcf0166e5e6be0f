"""Forward passes, recorded operation by operation, run without a trace, and run again."""
