"""The numbers of tokens a step had better have: what the engine has kernels for."""

CPU_STEP_SIZES: tuple[int, ...] = (
    *range(1, 8),
    *range(8, 16, 2),
    *range(16, 64, 4),
    *range(64, 128, 8),
    *range(128, 257, 16),
)
"""At which a CPU, which pads nothing, finds its kernels again.

oneDNN compiles a matrix product for each number of rows it meets. vLLM 0.32 keeps 32 of
them per layer and oneDNN 1024 per process: 100 numbers of rows, as the layers of two
models are of about ten kinds. Steps of any number of tokens often find what they need
gone: 2 ms of a step of 45 in a target of 100 M parameters with its drafter. No size is
more than a quarter above the last.
"""
