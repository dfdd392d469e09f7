"""A certificate of the tests' own for servers on this machine."""

import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Certificates:
    """PEM files."""

    certificate: Path
    key: Path

    @property
    def authority(self) -> Path:
        """The certificate is signed with its own key."""
        return self.certificate


def make_certificates(folder: Path) -> Certificates:
    """A certificate for 127.0.0.1 and localhost."""
    files = Certificates(folder / "server.pem", folder / "server.key")
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
    ]
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    out = ["-days", "2", "-keyout", str(files.key), "-out", str(files.certificate)]
    subprocess.run([*command, *names, *out], check=True, capture_output=True)
    return files
