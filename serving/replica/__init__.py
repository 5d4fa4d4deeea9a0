"""One engine's actor: server, metrics, capacity, warm start."""
