"""The wire formats of a turn, one file each."""
