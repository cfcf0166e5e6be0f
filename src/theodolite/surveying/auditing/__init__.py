"""The audit of a parameterization that somebody wrote by hand: `audit` and its result, `Audit`."""
