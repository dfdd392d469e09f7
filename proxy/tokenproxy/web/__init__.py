"""HTTP routes: the ASGI endpoint, the list of routes, authentication, sessions, status, pass-through."""
