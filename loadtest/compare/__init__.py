"""Arms in turn: `tetris-serve bench http`, or ``python -m loadtest.compare``.

``cli``, ``conditions``, ``runner``
    The command, what it measures, and the loop that goes through it.
``arms``, ``deployment``, ``locust_process``
    What is compared, started and stopped; Locust in a process of its own.
``scrape``, ``processes``
    What is seen of the server.
"""
