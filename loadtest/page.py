"""Pages that need nothing else: their templates, and figures inside them."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable
from pathlib import Path

from jinja2 import ChainableUndefined, Environment, FileSystemLoader
from matplotlib.figure import Figure


def make_environment(folder: Path) -> Environment:
    """Return what finds a folder's templates, and the style that pages share."""
    return Environment(
        loader=FileSystemLoader([folder, Path(__file__).parent]),
        autoescape=True,
        undefined=ChainableUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def to_png(figure: Figure, caption: str) -> bytes:
    """Return a figure with the first panel's legend, and a caption below."""
    figure.axes[0].legend(fontsize=7)
    figure.supxlabel(caption, fontsize=8, color="gray")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()


def embed(pictures: Iterable[tuple[str, bytes | None]]) -> list[dict[str, str]]:
    """Return titles and data of the pictures there are, as templates take them."""
    return [
        {"title": title, "data": base64.b64encode(png).decode()}
        for title, png in pictures
        if png is not None
    ]
