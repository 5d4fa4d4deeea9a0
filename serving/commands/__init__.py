"""What the `tetris-serve` commands do; `serving.cli` parses their arguments."""
