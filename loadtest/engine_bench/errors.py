"""Errors that the command explains to its user."""


class BenchError(Exception):
    """Something the user can put right; the message names it and says how."""
