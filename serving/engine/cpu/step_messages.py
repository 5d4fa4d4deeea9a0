"""What the scheduler tells the worker about a step beside vLLM's own message."""

STOP_ATTRIBUTE = "tetris_stop"
"""Where a `SchedulerOutput` carries the rule that ends its draft early: an attribute of
its own, which vLLM does not look at."""

QUIET_ATTRIBUTE = "tetris_quiet"
"""Where a `SchedulerOutput` says that nobody asks what the step took, likewise."""

REBUILD_ATTRIBUTE = "tetris_rebuild"
"""Where it names the requests for which the drafter fills its KV anew, likewise."""
