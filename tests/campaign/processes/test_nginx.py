"""The example in config/nginx.conf, run by a real nginx in front of the proxy."""

import re
import shutil
import socket
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.support.certificates import make_certificate
from tests.support.fake_vllm import Canned, FakeVllm, Reply
from tests.support.ports import held_port
from tests.support.utils import run_proxy, wait_until
from tokenproxy.settings import Settings

_EXAMPLE = Path(__file__).parents[3] / "config" / "nginx.conf"
_NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
_KEY = {"authorization": "Bearer secret"}
_HI = [{"role": "user", "content": "Hi"}]

pytestmark = pytest.mark.skipif(_NGINX is None, reason="nginx is not installed (apt-get install nginx-light)")


@contextmanager
def run_nginx(folder: Path, upstream: int) -> Iterator[httpx.Client]:
    """nginx with the example, on a port of its own; yields a client that trusts its certificate."""
    cert, key = make_certificate(folder)
    with held_port() as port:
        text = _EXAMPLE.read_text()
        for name, value in {
            "listen 443 ssl": f"listen 127.0.0.1:{port} ssl",
            "127.0.0.1:8100": f"127.0.0.1:{upstream}",
            "/etc/tokenproxy/cert.pem": str(cert),
            "/etc/tokenproxy/key.pem": str(key),
            "/run/nginx.pid": str(folder / "nginx.pid"),
        }.items():
            assert name in text
            text = text.replace(name, value)
        kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        temporary = "".join(f"{kind}_temp_path {folder}/{kind};" for kind in kinds)
        config = folder / "nginx.conf"
        config.write_text(text.replace("http {", f"http {{ access_log off; {temporary}", 1))
        base = [str(_NGINX), "-c", str(config), "-p", str(folder), "-e", str(folder / "error.log")]
        process = subprocess.Popen([*base, "-g", "daemon off; master_process off;"])
        try:
            wait_until(lambda: _listens(port))
            context = ssl.create_default_context(cafile=str(cert))
            url = f"https://127.0.0.1:{port}"
            with httpx.Client(base_url=url, verify=context, trust_env=False, timeout=30) as client:
                yield client
        finally:
            process.terminate()
            process.wait(20)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_the_example(mortal: FakeVllm, tmp_path: Path) -> None:
    with (
        run_proxy([mortal], api_key="secret", admin_key="operator", store="memory:") as proxy,
        run_nginx(tmp_path, proxy.base_url.port or 0) as client,
    ):
        # streams pass as they come, and a client that leaves aborts the engine
        mortal.replies.append(Reply(hold_at=1))
        body = {"messages": _HI, "stream": True}
        with client.stream("POST", "/v1/chat/completions", json=body, headers=_KEY) as answer:
            assert next(answer.iter_raw()).startswith(b"data: {")
            assert mortal.running == 1
        wait_until(lambda: mortal.aborted == 1)
        # paths are forwarded as they are, and those that can be read in two ways are refused
        assert client.get("/v1/a%252fb", headers=_KEY).status_code == 403
        sent = client.build_request("GET", "/", headers=_KEY)
        sent.extensions["target"] = b"/v1/x/../models"
        assert client.send(sent).json()["error"]["code"] == "invalid_path"
        # limits
        assert client.post("/v1/completions", content=b" " * (65 * 2**20), headers=_KEY).status_code == 413
        assert client.get("/v1/models", headers={"x-filler": "a" * 20_000}).status_code == 400
        # administration from the inside only, also with the key
        assert client.get("/admin/replicas", headers={"x-api-key": "operator"}).status_code == 403
        mortal.canned["/pause"] = Canned(b"{}")
        assert client.post("/pause", headers=_KEY).status_code == 403
        assert client.post("/pause", headers={"x-api-key": "operator"}).status_code == 200


def test_without_keys_requests_through_nginx_have_no_admin_scope(mortal: FakeVllm, tmp_path: Path) -> None:
    """To the proxy on a loopback address every client of nginx comes from this machine."""
    with (
        run_proxy([mortal], store="memory:") as proxy,
        run_nginx(tmp_path, proxy.base_url.port or 0) as client,
    ):
        mortal.canned["/pause"] = Canned(b"{}")
        assert client.post("/pause").status_code == 403
        assert client.post("/pause", headers={"host": "localhost"}).status_code == 403
        assert client.post("/v1/chat/completions", json={"messages": _HI}).status_code == 200
        assert proxy.post("/pause").status_code == 200


def test_the_example_agrees_with_the_defaults() -> None:
    text = _EXAMPLE.read_text()
    megabytes = re.search(r"client_max_body_size (\d+)m;", text)
    assert megabytes and int(megabytes[1]) * 2**20 == Settings().body_limit_bytes
    assert f"server 127.0.0.1:{Settings().port};" in text
