"""Errors that are explained to the user instead of traced back."""


class LoadTestError(Exception):
    """A load test that cannot go on; the message says why and what to do.

    Whatever reads options and folders of results, or starts something, may raise it.
    """
