"""What a replica answers whose engine is dead already."""


class EngineGoneError(Exception):
    """A request came to a replica whose engine had died before; it did no harm."""
