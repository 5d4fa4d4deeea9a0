"""What is made of runs: figures, verdicts, one HTML page, JSON and CSV."""
