"""The adapter to vLLM's V1 model runner, which its CPU platform runs."""
