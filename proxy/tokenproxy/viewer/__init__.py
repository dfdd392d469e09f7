"""The page that shows recorded rollouts: its static files, and the data that they read."""
