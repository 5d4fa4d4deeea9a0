"""Errors that are explained to the user instead of traced back."""


class LoadTestError(Exception):
    """A load test that cannot go on; the message says why and what to do."""
