"""Errors that are the caller's to mend."""


class UseError(ValueError):
    """Something handed to Theodolite cannot be used; the message names the culprit, the value and the fix.

    The command line prints it without a traceback and exits with 2.
    """


UseError.__module__ = "theodolite"  # as one catches it, and as tracebacks name it
