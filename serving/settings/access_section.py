"""Who may call: the part of the section `http` that says so."""

from typing import Annotated

from pydantic import Field

from serving.settings.section import Section


class AccessSettings(Section):
    """Who may call.

    Without keys, a server starts only if `allow_anonymous` says so. `up` says it by
    itself where it listens on a loopback address.
    """

    keys_file: Annotated[
        str | None,
        Field(
            min_length=1,
            description="the file of API keys, which `tetris-serve keys` writes; "
            "followed while it serves",
        ),
    ] = None
    allow_anonymous: Annotated[
        bool | None,
        Field(
            description="whether anybody may call without a key; "
            "unset: where `up` listens on a loopback address"
        ),
    ] = None
    redis_url: Annotated[
        str | None,
        Field(
            pattern=r"^rediss?://",
            description="where all fronts count the rates of keys together; unset: "
            "each front allows its part",
        ),
    ] = None
