"""The proof that output follows the target's law: see `test_law`."""
