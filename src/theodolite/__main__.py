"""`python -m theodolite` is `theodolite`."""

from theodolite.cli import main

main()
