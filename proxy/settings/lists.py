"""Settings that hold several values."""


def split(value: object) -> object:
    """Split a string with commas into a list of values; null gives an empty list."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return [] if value is None else value
