"""What both adapters share: the planner's host, classes, limits, counters."""
