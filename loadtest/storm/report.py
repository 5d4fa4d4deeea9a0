"""A storm on one page: what became of streams, and how long they stood still."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from matplotlib.figure import Figure

from loadtest.page import to_png, to_table

_FATES: Final = ("equal", "whole", "forgiven", "cut", "corrupted", "failed")
_SHARES: Final = ("p50_ms", "p90_ms", "p99_ms", "max_ms")


def write_report(results: Mapping[str, Any], folder: Path) -> None:
    """Write `results.md` and `storm.png`."""
    (folder / "results.md").write_text(render(results))
    if results["stalls"] and results["timeline"]:
        (folder / "storm.png").write_bytes(_draw(results))


def render(results: Mapping[str, Any]) -> str:
    """Return a storm's `results.json` as Markdown."""
    streams, law, kills = results["streams"], results["law"], results["kills"]
    machine, settings = results["machine"], results["settings"]
    lines = [
        "# A storm",
        "",
        f"{results['requests']} streams, {settings['in_flight']} at a time, over "
        f"{settings.get('replicas', 2)} replicas, "
        f"in {results['lasted_s'] / 60:.0f} minutes on {machine['cores']} cores of "
        f"{machine['cpu']}; {results['replayed_streams']} of them were replayed, "
        f"{results['replays']:.0f} times, with {results['tokens_recomputed']:.0f} "
        "tokens computed again.",
        *([f"It broke off: {results['incomplete']}."] if results["incomplete"] else []),
        "",
        to_table(
            [
                ["equal", "sampled, whole", *_FATES[2:]],
                [streams.get(fate, 0) for fate in _FATES],
            ]
        ),
        "",
        "How long streams that were under way stood still, ms:",
        "",
        to_table(
            [
                ["what", "times", "whole again after, s", "streams", *_SHARES],
                *(
                    [_name(kind, of), *_kills_of(kills, kind), *_figures(stall)]
                    for kind, stalls in results["stalls"].items()
                    for of, stall in stalls.items()
                ),
            ]
        ),
        "",
    ]
    if law.get("streams"):
        holds = "holds" if law["holds"] else "DOES NOT HOLD"
        fails = "is found out" if law["control_fails"] else "IS NOT FOUND OUT"
        lines += [
            f"The target's law over {law['tokens']} tokens of {law['streams']} "
            f"replayed streams at temperature 1 {holds} (z {law['z']}; evidence for "
            f"noise used twice 10^{law['same_noise_log10_e']}). The control, a replay "
            f"with the same seed, {fails} (10^{law['naive_replay_log10_e']}).",
            "",
        ]
    return "\n".join(lines)


def _name(kind: str, of: str) -> str:
    return kind if of == "all" else f"{kind}, {of} alone"


def _kills_of(kills: list[dict[str, Any]], kind: str) -> list[str]:
    after_s = sorted(
        one["recovered_after_s"]
        for one in kills
        if one["kind"] == kind and one["recovered_after_s"] is not None
    )
    middle = f"{after_s[len(after_s) // 2]:.0f}" if after_s else "-"
    return [str(sum(one["kind"] == kind for one in kills)), middle]


def _figures(stall: Mapping[str, float]) -> list[str]:
    return [str(stall["streams"]), *(f"{stall[share]:.0f}" for share in _SHARES)]


def _draw(results: Mapping[str, Any]) -> bytes:
    rows = {
        _name(kind, of): stall
        for kind, stalls in results["stalls"].items()
        for of, stall in stalls.items()
    }
    figure = Figure(figsize=(9, 3.5 + 0.4 * len(rows)), layout="constrained")
    heights = [1.5 + 0.4 * len(rows), 2]
    stood, over_time = figure.subplots(2, height_ratios=heights)
    for share, shade in zip(reversed(_SHARES), (0.85, 0.65, 0.4, 0.0), strict=True):
        values = [max(1.0, stall[share]) for stall in rows.values()]
        stood.barh(list(rows), values, color=str(shade), label=share.split("_")[0])
    stood.set_xscale("log")
    stood.set_xlim(left=10.0)
    stood.set_xlabel("ms without a token")
    stood.invert_yaxis()
    timeline = results["timeline"]
    at_s = [one["at_s"] for one in timeline]
    over_time.plot(at_s, [one["parts"] for one in timeline], lw=0.7)
    for kill in results["kills"]:
        over_time.axvline(kill["at_s"], color="tab:red", lw=0.5)
    over_time.set_xlabel("s; a line at each")
    over_time.set_ylabel("parts of streams/s")
    machine = results["machine"]
    return to_png(
        figure,
        f"{results['requests']} streams, {len(results['kills'])} times; "
        f"{machine['cores']} cores of {machine['cpu']}",
    )
