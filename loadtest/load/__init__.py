"""What is sent when, and Locust's side of it. Only this runs under gevent.

``arrivals``, ``workloads``
    What is sent when.
``options``, ``session``, ``run``
    One run inside Locust's processes; ``loadtest/locustfile.py`` has its users.
"""
