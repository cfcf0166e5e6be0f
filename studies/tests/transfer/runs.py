"""Rows of a ledger that were made up."""


def row(width, depth, exponent, loss, *, kind="plan", seed=0, optimizer="adamw", workload="gpt-enwik8"):
    return {
        "workload": workload,
        "optimizer": optimizer,
        "parameterization": kind,
        "width": width,
        "depth": depth,
        "lr": 2.0**exponent,
        "seed": seed,
        "status": "diverged" if loss is None else "finished",
        "step": 500,
        "held_out": loss,
    }
