"""Endpoints under load, over HTTP, with Locust.

``python -m loadtest.http_bench --help`` runs whole experiments. The Locust file also
works by itself, with Locust's web page or distributed workers:
``locust -f loadtest/http_bench/locustfile.py --host http://127.0.0.1:8000``.

``sse``, ``chat_stream``, ``outcome``, ``streaming``
    One request: its stream, what it means, what became of it.
``shapes``, ``load``, ``workloads``, ``client_chaos``
    What is sent when.
``locustfile``, ``locust_run``, ``locust_rows``, ``session``, ``options``, ``live``,
``client_health``, ``web_page``
    Locust's side. Only these run under gevent, in a process of their own.
``cli``, ``presets``, ``experiment``, ``run``, ``arms``, ``deployment``,
``locust_process``, ``store``
    The command: what is compared, and the controller that goes through it.
``scrape``, ``processes``, ``chaos``, ``redeploy``
    What is seen of the server, and what befalls it.
``records``, ``summary``, ``results``, ``growth``, ``objectives``, ``figures``,
``report``
    What is made of it.
``cross_check``
    The same cell measured by ``vllm bench serve``.
"""
