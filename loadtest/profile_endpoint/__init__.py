"""Where a running deployment's CPU time goes: stacks of all its processes, grouped.

`stacks` reads and groups them, `sampling` takes them with py-spy, `table` writes them.
"""
