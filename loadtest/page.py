"""Pages that need nothing else: their templates, and figures inside them."""

import base64
import io
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jinja2 import ChainableUndefined, Environment, FileSystemLoader
from matplotlib.figure import Figure


def make_environment(folder: Path) -> Environment:
    """Return what finds a folder's templates, and the style that pages share.

    Pages in Markdown escape nothing.
    """
    return Environment(
        loader=FileSystemLoader([folder, Path(__file__).parent]),
        autoescape=lambda name: ".html" in (name or ""),
        undefined=ChainableUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def render_results(folder: Path, results: Mapping[str, Any], **more: Any) -> str:
    """Render a benchmark's `results.md`, whose template lies in a folder.

    It may include `origin.md.jinja`: where results come from.
    """
    template = make_environment(folder).get_template("results.md.jinja")
    source = describe_source(results["environment"])
    return template.render(results, source=source, **more)


def describe_source(environment: Mapping[str, Any]) -> str:
    """Say on which machine, and of which models."""
    machine, models = environment["machine"], environment["models"]
    pair = ", ".join(
        f"{role} {one['name']} ({one['parameters'] / 1e6:.3g} M parameters, "
        f"{one['digest'][:8]})"
        for role, one in models.items()
    )
    return "; ".join(filter(None, (machine.get("gpu") or machine["cpu"], pair)))


def to_table(lines: Iterable[Iterable[Any]]) -> str:
    """Return lines of cells, the header first, as Markdown."""
    texts = [f"| {' | '.join(map(str, line))} |" for line in lines]
    if texts:
        texts.insert(1, "|" + " --- |" * (texts[0].count(" | ") + 1))
    return "\n".join(texts)


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
