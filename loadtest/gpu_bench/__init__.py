"""Compares policies with vLLM's own on one GPU, in parts that keep what they measured.

Written without a GPU: the pure parts are tested, the measuring has never been run.
"""
