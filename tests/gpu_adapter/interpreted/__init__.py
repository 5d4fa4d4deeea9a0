"""vLLM's V2 runner and ours at work without a GPU; run by `test_interpreted.py`."""
