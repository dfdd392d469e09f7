"""Training samples from recorded trees of turns, in the field names of several trainers, and their export."""
