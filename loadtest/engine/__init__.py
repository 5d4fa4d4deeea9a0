"""Policies compared on the real engine, offline, on the same requests.

``tetris-serve bench engine --help`` lists the options. Every policy gets an engine in a
process of its own, which `serving.offline` configures as a server's.

``plan``, ``arms``, ``presets.yaml``, ``workloads``, ``models``, ``gpu``
    What is compared, on which requests, where.
``cli``, ``run``, ``store``
    The command, and the controller that goes through rounds, cells, blocks and arms.
``pool``, ``arm_process``, ``neighbour``, ``lifetime``
    Processes, which end with the controller.
``worker``, ``arm_engine``, ``closed_loop``, ``held_depth``
    What happens inside an arm's process.
``measurement``, ``counters``, ``watch``, ``outcome_bins``, ``trace``
    What is noted there of requests, scheduler and planner.
``summary``, ``report``, ``plots``
    Figures made of it, and what is written.
"""
