"""What `up` decides for this machine where nobody has: who may call, what is shown."""

from serving.local import ports
from serving.settings.key_file import read_keys
from serving.settings.model import Settings, SettingsError


def with_board_text(settings: Settings) -> Settings:
    """Decide on the board's text, if nobody has: only for eyes on this machine."""
    if settings.http.board_text is not None:
        return settings
    is_private = ports.is_loopback(settings.http.host)
    http = settings.http.model_copy(update={"board_text": is_private})
    return settings.model_copy(update={"http": http})


def with_access(settings: Settings) -> Settings:
    """Let in anybody on this machine, if nobody has decided who may call.

    Raises:
        SettingsError: The file of keys cannot be read, or names a class that is none.
    """
    access = settings.http.access
    if access.keys_file is not None:
        _check_keys(access.keys_file, settings)
    is_private = ports.is_loopback(settings.http.host)
    if access.allow_anonymous is not None or access.keys_file or not is_private:
        return settings
    access = access.model_copy(update={"allow_anonymous": True})
    http = settings.http.model_copy(update={"access": access})
    return settings.model_copy(update={"http": http})


def _check_keys(keys_file: str, settings: Settings) -> None:
    try:
        keys = read_keys(keys_file)
    except (OSError, ValueError) as error:
        raise SettingsError([f"http.access.keys_file: {error}"]) from None
    problems = [
        f"http.access.keys_file: the key {name!r} is of the class "
        f"{key.request_class!r}, which policy.classes has not; add it there"
        for name, key in keys.items()
        if key.request_class not in {None, *settings.policy.classes}
    ]
    if problems:
        raise SettingsError(problems)


def base_url_of(settings: Settings) -> str:
    """Return where this machine reaches the server."""
    host = settings.http.host
    if host in {"0.0.0.0", "::"}:
        host = "127.0.0.1"
    return f"http://{f'[{host}]' if ':' in host else host}:{settings.http.port}"
