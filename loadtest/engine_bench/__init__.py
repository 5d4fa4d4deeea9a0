"""Policies compared on the real engine, offline, on the same requests.

``python -m loadtest.engine_bench --help`` lists the options. Every policy gets an
engine in a process of its own; the processes take turns, and all but one are stopped.

``arms``, ``plan``, ``settings``
    What is compared, on which cells, under which conditions.
``cli``, ``run``, ``progress``
    The command, and the controller that goes through rounds, cells and arms.
``pool``, ``arm_process``, ``neighbour``, ``lifetime``, ``yardstick``
    Processes that run one at a time, while the machine is itself, and end with the
    controller.
``worker``, ``engine``, ``closed_loop``, ``measurement``, ``held_depth``
    What happens inside an arm's process.
``telemetry``, ``step_errors``, ``acceptance_errors``, ``trace``
    What is noted there of scheduler and planner.
``gpu``
    What differs where the engines run on a GPU.
``workloads``, ``models``
    Requests and models.
``store``, ``comparison``, ``outcome_bins``, ``rows``, ``recovery``, ``saturation``,
``traces``
    What is kept, and figures made of it.
``prices``, ``replay``, ``offline_fit``, ``hindsight``, ``bounds``
    What any selector could have reached on the recorded drafts.
``ablations``, ``ablation_scenarios``
    What each part of `goodput` is worth, on recorded drafts.
``verdict``, ``verdicts``, ``estimates``
    What the benchmark is meant to show, and whether it does.
``report``, ``tables``, ``judged_tables``, ``markdown``, ``plots``
    What is written.
"""
