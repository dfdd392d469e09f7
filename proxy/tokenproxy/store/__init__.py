"""Where turns are kept: in memory, in SQLite, in Redis."""
