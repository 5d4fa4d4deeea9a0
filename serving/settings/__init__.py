"""Settings of one deployment: the model, its checks, the report."""
