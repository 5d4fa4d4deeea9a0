"""`http.front`, which once chose between fronts and Ray's ingress."""

from typing import Any

from serving.settings.finding import Finding


def drop_front_choice(data: dict[str, Any]) -> list[Finding]:
    """Take the choice out of the sections.

    Args:
        data: The sections, not checked yet. A new `http` section is put into it.

    Returns:
        A warning, if the choice was the one that is left.

    Raises:
        ValueError: It was another.
    """
    http = data.get("http")
    if not isinstance(http, dict) or "front" not in http:
        return []
    if http["front"] != "fleet":
        raise ValueError(
            f"http.front: {http['front']} is gone, and fronts answer all requests; "
            "remove the setting"
        )
    data["http"] = {name: http[name] for name in http if name != "front"}
    message = "fleet is all there is; remove the setting"
    return [Finding("warning", "http.front", message)]


def allow_front_choice(schema: dict[str, Any]) -> None:
    """Let a schema of `http` pass what is still read."""
    schema["properties"]["front"] = {
        "enum": ["fleet"],
        "deprecated": True,
        "description": "old: fronts answer all requests",
    }
