"""Conversations as trees of turns: recognise, record, deliver as samples. Knows nothing of wire formats."""
