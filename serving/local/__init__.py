"""A Ray of our own on this machine, and vLLM without Ray."""
