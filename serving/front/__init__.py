"""What clients talk to: HTTP, errors, the board."""
