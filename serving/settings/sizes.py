"""Numbers of bytes as people write them: `512Mi`, `4Gi`, `1G`."""

import re
from typing import Annotated, Any, Final

from pydantic import (
    BeforeValidator,
    ByteSize,
    PlainSerializer,
    TypeAdapter,
    WithJsonSchema,
)

_FORM: Final = r"\d+(\.\d+)?\s*([kKMGTP]i?)?B?"
_BYTE_SIZE: Final = TypeAdapter(ByteSize)
_UNITS: Final = {
    "Ti": 1 << 40,
    "Gi": 1 << 30,
    "Mi": 1 << 20,
    "Ki": 1 << 10,
    "T": 10**12,
    "G": 10**9,
    "M": 10**6,
    "k": 10**3,
}


def read_size(value: Any) -> Any:
    """Turn a size with a unit into bytes; what is no text is left to pydantic.

    Raises:
        ValueError: The text is no size.
    """
    if not isinstance(value, str):
        return value
    text = value.strip()
    if re.fullmatch(_FORM, text) is None:
        raise ValueError(
            f"must be bytes, or a size such as 512Mi, 4Gi or 1G (got {value!r})"
        )
    return int(_BYTE_SIZE.validate_python(text + "B" if text[-1] == "i" else text))


def show_size(num_bytes: int) -> str:
    """Write bytes so that `read_size` gives the same number again."""
    for unit, size in _UNITS.items():
        if num_bytes and num_bytes % size == 0:
            return f"{num_bytes // size}{unit}"
    return str(num_bytes)


Bytes = Annotated[
    int,
    BeforeValidator(read_size),
    PlainSerializer(show_size, return_type=str, when_used="json"),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "integer", "minimum": 0, "description": "bytes"},
                {
                    "type": "string",
                    "pattern": f"^{_FORM}$",
                    "description": "a size such as `512Mi`",
                },
            ]
        }
    ),
]
"""The type of a setting in bytes."""
