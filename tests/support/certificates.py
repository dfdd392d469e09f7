"""Certificates for this machine, each signed with its own key."""

import subprocess
from pathlib import Path


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """A certificate for this machine, and its key."""
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN=localhost"
    names = "-addext subjectAltName=DNS:localhost,IP:127.0.0.1 -days 2"
    out = ["-keyout", str(key), "-out", str(cert)]
    subprocess.run([*command.split(), *names.split(), *out], check=True, capture_output=True)
    return cert, key
