"""What was seen of a fleet, in words and numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


def render(results: Mapping[str, Any]) -> str:
    """Render `results.md`: a sentence or two for each part that was played."""
    texts = {
        name: show(results[name]) for name, show in _SHOWN.items() if name in results
    }
    lines = ["# A fleet, live", "", "| part | seen |", "|---|---|"]
    lines += [f"| {name} | {text} |" for name, text in texts.items()]
    one = results[next(iter(texts))]
    versions = ", ".join(f"{name} {v}" for name, v in one["versions"].items())
    commits = ", ".join(sorted({str(results[n]["commit"])[:8] for n in texts}))
    machine = one["machine"]
    lines += [
        "",
        f"{one['config']} on {machine['cpu']}, {machine['cores']} cores, clients "
        f"included; {versions}; commit {commits}; {one['started'][:10]}.",
        "Timelines: [results.png](results.png).",
    ]
    return "\n".join([*lines, ""])


def _count(part: Mapping[str, Any]) -> str:
    failed = sum(part["failures"].values())
    words = ", ".join(f"{n} {kind}" for kind, n in part["failures"].items())
    return f"{part['requests']} requests, {failed} failed{f' ({words})' * bool(words)}"


def _follow(part: Mapping[str, Any]) -> str:
    """Return the numbers of running replicas, one after the other."""
    running: list[int] = []
    for point in part["timeline"]:
        count = point.get("running")
        if count is not None and (not running or running[-1] != count):
            running.append(int(count))
    return " → ".join(map(str, running))


def _show_growth(part: Mapping[str, Any]) -> str:
    waited_s = part["ttft_max_ms"] / 1e3
    starts = [point["start_s"] for point in part["timeline"] if "start_s" in point]
    told = f"; a start takes {starts[-1]:.0f} s, as seen" if starts else ""
    return (
        f"running replicas {_follow(part)}; {_count(part)}; median time to first token "
        f"{part['ttft_p50_ms']:.0f} ms, longest {waited_s:.1f} s{told}"
    )


def _show_mix(part: Mapping[str, Any]) -> str:
    halves = [
        f"{part['wanted'][name]:.1f} replicas wanted at temperature {name}, where a "
        f"step brings {length:.2f} tokens"
        for name, length in part["accepted"].items()
    ]
    return f"{'; '.join(halves)}; {_count(part)}"


def _show_overload(part: Mapping[str, Any]) -> str:
    refused = ", ".join(f"{n} {kind}" for kind, n in part["refused"].items())
    usual_s, worst_s = (1e-3 * one for one in part["late_ms"])
    late = f" (median {usual_s:.1f} s, worst {worst_s:.1f})" if part["late"] else ""
    return (
        f"twice {part['capacity_per_s']:.1f} requests a second, {part['deadline_ms']} "
        f"ms each: of {part['requests']} {part['in_time']} in time, {part['late']} late"
        f"{late}, not served {refused or 'none'}"
    )


def _show_keys(part: Mapping[str, Any]) -> str:
    alone = part["alone"]

    def tell(name: str) -> str:
        p95_ms = part[name]["ttft_p95_ms"]
        return f"{p95_ms:.0f} ({p95_ms / alone['ttft_p95_ms']:.1f} times)"

    return (
        f"p95 of the quiet key's time to first token {alone['ttft_p95_ms']:.0f} ms "
        f"alone, {tell('seated')} beside a key whose requests all have seats, "
        f"{tell('beside')} beside one that floods, whose own is "
        f"{part['flood']['ttft_p95_ms']:.0f}"
    )


def _show_neighbour(part: Mapping[str, Any]) -> str:
    alike, beside = (
        part[name]["share_of_the_one_with_fewer"] for name in ("alike", "neighbour")
    )
    return (
        f"of two replicas the one with fewer requests gets {alike:.0%} of them; with a "
        f"busy process on the core of one {beside:.0%}"
    )


_SHOWN = {
    "scale": _show_growth,
    "idle": _show_growth,
    "mix": _show_mix,
    "overload": _show_overload,
    "keys": _show_keys,
    "neighbour": _show_neighbour,
}
