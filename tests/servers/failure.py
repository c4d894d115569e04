"""The one exception that `tests/services` reports to its user as a sentence."""


class Failure(Exception):
    """What went wrong, on what, and what to do about it."""
