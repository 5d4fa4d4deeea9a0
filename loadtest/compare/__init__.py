"""Arms in turn over HTTP: `tetris-serve bench http`.

``cli``, ``conditions``, ``runner``
    The command, what it measures, and the loop that goes through it.
``stopping``
    How many rounds are enough.
``arms``, ``deployment``, ``locust_process``
    What is compared, started and stopped; Locust in a process of its own.
``scrape``, ``processes``, ``cpu``
    What is seen of the server.
"""
