"""Hide from a server's processes what is here for the load test alone.

vLLM imports some of it where it is, which takes each of them seconds.
"""

# ruff: noqa: INP001 - Python looks for it by itself, in no package

import sys

sys.modules |= dict.fromkeys(("scipy", "pandas", "matplotlib"))  # type: ignore[arg-type]
