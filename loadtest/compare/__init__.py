"""Arms in turn: `tetris-serve bench http`, or ``python -m loadtest.compare``.

``cli``, ``conditions``, ``runner``
    The command, what it measures, and the loop that goes through it.
``arms``, ``deployment``, ``locust_process``
    What is compared, started and stopped; Locust in a process of its own.
``scrape``, ``processes``, ``chaos``, ``redeploy``
    What is seen of the server, and what befalls it.
``cross_check``
    The same cell measured by ``vllm bench serve``.
"""
