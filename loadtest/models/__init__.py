"""A small target and draft model that train on two CPU cores.

``python -m loadtest.models --help`` lists the commands. The tasks alone
(:mod:`loadtest.models.tasks`) need nothing but the standard library.
"""
