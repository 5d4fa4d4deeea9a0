"""The experiments of the TETRIS paper (arXiv 2502.15197) as one command."""
