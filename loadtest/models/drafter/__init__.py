"""An EAGLE-3 head for a target, trained on text that the target writes itself.

``python -m loadtest.models.drafter --help`` lists the commands, in the order in which
they run. Each goes on where it was stopped.
"""
