"""Models that are local folders need no download, but maybe a conversion."""

import asyncio
import logging

from serving.compat_ray import CallbackBase
from serving.settings.gguf_models import convert_alike

logger = logging.getLogger("ray.serve")


class SkipLocalDownload(CallbackBase):
    """Skips the download step for models that are local folders.

    Ray starts a worker process for it that imports vLLM to find nothing to do, which
    costs about ten seconds of start-up on two cores. What there is to do instead is
    converting GGUF files, if the deployment was built on another machine.
    """

    async def on_before_node_init(self) -> None:
        """Switch the download step off.

        Raises:
            GgufError: A GGUF file is missing on this machine, or another one.
        """
        self.ctx.run_init_node = False
        for name, folder in self.kwargs["gguf_files"].items():
            await asyncio.to_thread(convert_alike, name, folder, logger.info)
