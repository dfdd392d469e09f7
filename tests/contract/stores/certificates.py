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

    def options(self, port: int) -> tuple[str, ...]:
        """Of a Redis server that has TLS on a port; its other port tells that it has started."""
        files = ("--tls-cert-file", self.certificate, "--tls-key-file", self.key)
        more = ("--tls-ca-cert-file", self.authority, "--tls-auth-clients", "no", "--tls-port", port)
        return tuple(map(str, (*files, *more)))


def make_certificates(folder: Path) -> Certificates:
    """A certificate for 127.0.0.1 and localhost."""
    files = Certificates(folder / "server.pem", folder / "server.key")
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    out = ["-days", "2", "-keyout", str(files.key), "-out", str(files.certificate)]
    subprocess.run(["openssl", "req", "-x509", *key, *names, *out], check=True, capture_output=True)
    return files
