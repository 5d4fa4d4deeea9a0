"""The adapter to vLLM's V2 model runner, which GPUs run."""
