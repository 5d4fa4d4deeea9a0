"""A small target and draft model that train on two CPU cores.

``python -m loadtest.models`` trains them. The tasks alone
(:mod:`loadtest.models.tasks`) need nothing but the standard library.
"""
