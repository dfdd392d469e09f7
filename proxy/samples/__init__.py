"""Recorded trees of turns become training samples."""
