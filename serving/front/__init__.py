"""The front: HTTP in, leases and tokens; no model weights."""
