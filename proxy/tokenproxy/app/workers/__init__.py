"""Several processes of the proxy on one port: `tokenproxy serve --workers N`."""
