"""Speculative-decoding policies: pure algorithms on NumPy arrays.

Nothing in this package knows vLLM, Ray or torch, reads a clock or the
environment, or draws from a global random generator.
"""
