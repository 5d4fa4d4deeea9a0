"""What is sent when, and Locust's side of it. Only this runs under gevent.

``arrivals``, ``workloads``, ``client_chaos``
    What is sent when, and what clients do to their own streams.
``options``, ``session``, ``run``, ``web_page``
    One run inside Locust's processes; ``loadtest/locustfile.py`` has its users.
"""
