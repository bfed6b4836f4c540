"""The error that bad input raises."""


class JaxkvError(ValueError):
    """Bad input: the message names the value, the limit it broke and, if any, the setting to change.

    Raised before anything is changed. The command line prints the message and exits with code 2.
    """
