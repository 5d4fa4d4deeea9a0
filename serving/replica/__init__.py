"""One engine replica: its actor, its leases and its token channel."""
