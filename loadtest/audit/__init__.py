"""Is what an engine says of its own gain true, and is it never worse than without?"""
