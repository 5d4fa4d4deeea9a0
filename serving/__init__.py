"""Tetris Serve: speculative decoding with TETRIS selection on Ray Serve and vLLM."""
