"""Many runs: as values, on engines, in a ledger."""
