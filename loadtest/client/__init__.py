"""One request over HTTP: its stream, what it means, what became of it."""
