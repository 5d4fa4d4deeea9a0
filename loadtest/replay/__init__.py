"""Recorded drafts played again: what any selector could have reached on them.

Takes the traces that `tetris-serve bench engine` leaves. Nothing imports this
package; it goes once the simulator tells the same.

``traces``, ``prices``
    What was recorded, and what steps cost there.
``replay``, ``offline_fit``, ``hindsight``
    Drafts played again by fixed lengths, by planners, by one that knows its estimates
    beforehand, by one that knows the outcomes.
``bounds``
    All of that for one cell: ``python -m loadtest.replay.bounds --help``.
``ablations``, ``ablation_scenarios``
    What each part of `goodput` is worth: ``python -m loadtest.replay.ablations``.
"""
