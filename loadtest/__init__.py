"""Load generation and the demo models that it can be run against."""
