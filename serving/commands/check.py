"""`tetris-serve check`: what a deployment file means, without starting anything."""

from serving.app import find_problems
from serving.commands.console import Console
from serving.commands.doctor import report
from serving.engine_args import engine_kwargs_of
from serving.settings.finding import Finding
from serving.settings.model import Settings
from serving.settings.number_format import with_fast_format
from serving.settings.sizes import show_size


def check(source: str, settings: Settings) -> int:
    """Print what vLLM would be given and whether the models fit together.

    Args:
        source: The deployment file or the model, for the report.
        settings: Its settings, already validated.

    Returns:
        The exit code: 1 if a model is missing or the pair does not match.
    """
    console = Console()
    chosen: list[Finding] = []
    settings = with_fast_format(settings, chosen.append)
    console.say(f"{source}: settings are valid; engine arguments:")
    for name, value in engine_kwargs_of(settings).items():
        size = f" ({show_size(value)})" if name.endswith("_bytes") else ""
        console.say(f"  {name}: {value}{size}")
    return report([*settings.findings, *chosen, *find_problems(settings)])
