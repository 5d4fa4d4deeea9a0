"""Named experiments: a sentence, and values for options that are not given."""

from __future__ import annotations

from typing import Any

PRESETS: dict[str, tuple[str, dict[str, Any]]] = {
    "smoke": (
        "does it run: two policies, short runs",
        {
            "policies": "none,tetris:2+2",
            "loads": "closed:2,poisson:1",
            "duration": 15.0,
            "lead_in": 2.0,
            "warm_up": 5.0,
            "rounds": 1,
            "max_tokens": 48,
        },
    ),
    "sweep": (
        "four policies at 1 to 32 requests in flight and under a spike",
        {
            "policies": "none,fixed:3,tetris:2+2,goodput:8",
            "loads": "closed:1,closed:2,closed:4,closed:8,closed:16,closed:32,"
            "closed:spike:2-24",
            "set": ["replicas.max=1", "engine.max_num_seqs=32"],
        },
    ),
    "overhead": (
        "what our endpoint costs over vLLM's own server",
        {
            "arm": [
                "ours=none",
                "vllm=vllm:none",
                "ours2=fixed:2",
                "vllm2=vllm:fixed:2",
            ],
            "loads": "closed:1,closed:8,closed:16",
            "rounds": 5,
            "set": ["replicas.max=1"],
        },
    ),
    "autoscale": (
        "a rush of ten minutes: replicas 1 to 3 and back",
        {
            "policies": "tetris:2+2",
            "loads": "closed:spike:2-40",
            "duration": 600.0,
            "rounds": 1,
            "set": ["replicas.max=3", "replicas.downscale_delay_s=30"],
        },
    ),
    "chaos": (
        "an engine and a replica die, clients stall and drop their connections",
        {
            "policies": "tetris:2+2",
            "loads": "closed:8",
            "duration": 240.0,
            "rounds": 1,
            "chaos": "stall@0.1x4=5,drop@0.2x4,kill-engine@0.3,kill-replica@0.65",
            "set": ["replicas.min=2", "replicas.max=2"],
        },
    ),
    "soak": (
        "an hour; memory, file descriptors, threads and KV cache must not grow",
        {
            "policies": "tetris:2+2",
            "workloads": "chats",
            "loads": "poisson:1",
            "rounds": 1,
            "soak": True,
            # A small KV cache: its pages become memory when they are first written,
            # which takes a large one longer than the run.
            "set": ["replicas.max=1", "engine.kv_cache_memory_bytes=67108864"],
        },
    ),
}
