"""What a check of a deployment has found."""

from dataclasses import dataclass
from typing import Literal

Severity = Literal["ok", "note", "warning", "error"]


@dataclass(frozen=True)
class Finding:
    """One result of a check.

    Attributes:
        severity: `error` means that the deployment cannot work; a `note` says what
            could not be checked, or was chosen because nobody has.
        setting: The setting the result is about.
        message: What was found and, unless all is well, how to fix it.
    """

    severity: Severity
    setting: str
    message: str

    def __str__(self) -> str:
        """Render as the settings' own errors are: setting, then reason."""
        return f"{self.setting}: {self.message}"
