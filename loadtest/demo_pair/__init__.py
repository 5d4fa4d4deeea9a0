"""A small target and draft model that train on two CPU cores.

``python -m loadtest.demo_pair --help`` lists the commands. The tasks alone
(:mod:`loadtest.demo_pair.tasks`) need nothing but the standard library.
"""
