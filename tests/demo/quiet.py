def quiet(_line: str) -> None:
    """Takes a progress line and says nothing."""
