"""Kills parts of a running deployment under streams, and compares what clients got."""
