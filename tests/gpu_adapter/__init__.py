"""The GPU adapter as far as a machine without one can test it."""
