"""Scaling laws: fitted to runs, with intervals on all they say, and with what the data cannot tell."""

from theodolite.fits.allocation import allocation
from theodolite.fits.fitting import FORMS, fit
from theodolite.fits.isoflop import isoflop
from theodolite.fits.laws import chinchilla, depth_expansion, power
from theodolite.fits.result import Fit, FitEstimate, HeldOutRuns

__all__ = [
    # from a file, a ledger or rows
    "FORMS",
    "fit",
    # from arrays, one for each form
    "allocation",
    "chinchilla",
    "depth_expansion",
    "isoflop",
    "power",
    # what comes out
    "Fit",
    "FitEstimate",
    "HeldOutRuns",
]
