"""Policies compared on the real engine, offline, on the same requests.

``tetris-serve bench engine --help`` lists the options. Every policy gets an engine in a
process of its own, which `serving.offline` configures as a server's.

``cli``, ``plan``, ``presets.yaml``, ``models``, ``workloads``
    The command: what is compared, on which models and requests.
``run``, ``pool``
    What `loadtest.experiment` goes through: blocks of requests, taken by arms in turn;
    processes, which end with the controller.
``worker``, ``loop``, ``measurement``, ``watch``
    Inside an arm's process: what is driven, and noted of requests and planner.
``summary``, ``report``, ``results.md.jinja``
    Figures made of it, and what is written.
"""
