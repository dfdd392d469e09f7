"""One chat turn: the request, how it is served, and how a completion is read."""
