"""The error that bad input raises."""


class JaxkvError(ValueError):
    """Bad input: the message names the value, the limit it broke and, if any, the setting to change.

    Raised before anything is changed. The command line prints the message and exits with code 2.
    """


class NoMemoryError(JaxkvError):
    """A machine's memory is too small for what is asked: with another machine the same input is good."""
