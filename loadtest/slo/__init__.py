"""Latency classes against load: who keeps their time per token, and how many do.

``tetris-serve bench slo --help`` lists the options. It runs on the engines, and
processes, of `loadtest.engine`.
"""
