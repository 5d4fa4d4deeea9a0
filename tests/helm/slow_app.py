"""A deployment that streams slowly, in place of an engine that starts slowly."""

import asyncio
from collections.abc import AsyncGenerator

from ray import serve
from starlette.responses import StreamingResponse

from tests.helm.live import NUM_CHUNKS

PERIOD_S = 0.25


@serve.deployment(
    num_replicas=1,
    ray_actor_options={"num_cpus": 1},
    graceful_shutdown_timeout_s=60,
    graceful_shutdown_wait_loop_s=0.5,
)
class SlowStream:
    async def __call__(self) -> StreamingResponse:
        return StreamingResponse(self._numbers(), media_type="text/plain")

    async def _numbers(self) -> AsyncGenerator[str, None]:
        for number in range(NUM_CHUNKS):
            yield f"{number}\n"
            await asyncio.sleep(PERIOD_S)


app = SlowStream.bind()
