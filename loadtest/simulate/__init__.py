"""A fleet of one to thousands of replicas, computed instead of run.

``tetris-serve simulate --help`` lists the options. Engines are data files
(`engine`), loads are drawn (`load`), the event loop is compiled (`kernel`), and arms
are compared on the same requests (`compare`).
"""
