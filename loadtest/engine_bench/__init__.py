"""Policies compared on the real engine, offline, on the same requests.

``python -m loadtest.engine_bench --help`` lists the options. Every policy gets an
engine in a process of its own; the processes take turns, and all but one are stopped.

``arms``, ``plan``, ``settings``
    What is compared, on which cells, under which conditions.
``cli``, ``run``, ``progress``
    The command, and the controller that goes through rounds, cells and arms.
``pool``, ``arm_process``, ``neighbour``, ``lifetime``
    Processes that run one at a time and end with the controller.
``worker``, ``engine``, ``closed_loop``, ``measurement``, ``trace``
    What happens inside an arm's process.
``workloads``, ``models``
    Requests and models.
``store``, ``comparison``, ``rows``, ``tables``, ``plots``, ``traces``, ``report``
    What is kept and what is made of it.
"""
