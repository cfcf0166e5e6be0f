"""`UseError`: errors that the caller can fix."""


class UseError(ValueError):
    """An argument or input cannot be used; the message names the culprit, the value and the fix.

    The command line prints it without a traceback and exits with 2.
    """


UseError.__module__ = "theodolite"  # its public name, also in tracebacks
