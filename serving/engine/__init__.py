"""Adapters between vLLM objects and the arrays the policies work on."""
