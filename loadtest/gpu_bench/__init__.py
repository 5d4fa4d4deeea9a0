"""Compares policies with vLLM's own on one GPU, in parts that keep what they measured.

Written without a GPU: the pure parts are tested, the measuring has never been run.
Where the GPU is on a machine without a network, in this order, each command resumable:

1. there: `python3 -m pip list --format=freeze`, kept as `have.txt`;
2. here: `python -m loadtest.gpu_bench prepare --have have.txt`, which downloads the
   wheels that are lacking there, cuts them into loads that one transfer takes, and
   prints the commands to run there with each load;
3. there: those commands. The last ones measure; results are copied after every arm.

The padded pairs cost what models of their size cost, but for attention: heads, and so
the KV cache, are the small demo models'. What long contexts cost is underrated.
"""
