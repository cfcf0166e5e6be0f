"""Second derivatives of a loss: operators, their projections and spectra, slices of the landscape."""
