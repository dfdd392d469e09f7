def quiet(_line: str) -> None:
    """Discard a progress line."""
