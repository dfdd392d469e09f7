"""What programs that run others need: free ports, and an environment for the child."""

import socket
import subprocess
import sys

import pytest

from tokenproxy.app.children import child_environment, free_port


def test_a_free_port_is_none_that_a_connection_of_a_client_gets() -> None:
    ports = {free_port("127.0.0.1") for _ in range(20)}
    assert len(ports) > 1 and max(ports) < 32_768
    with socket.create_server(("127.0.0.1", next(iter(ports)))):  # it is free
        pass


def test_a_host_that_is_not_of_this_machine_has_no_free_port() -> None:
    with pytest.raises(OSError, match=r"192\.0\.2\.254.*no free port"):
        free_port("192.0.2.254")


def test_a_child_finds_the_packages_though_none_is_installed_and_no_room_of_theirs() -> None:
    names = ("tokenproxy", "chat_tokenizer", "settings", "web")
    code = f"from importlib.util import find_spec; print([bool(find_spec(name)) for name in {names}])"
    command = [sys.executable, "-S", "-c", code]  # without site-packages
    environment = child_environment() | {"PYTHONSAFEPATH": "1"}
    printed = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True, cwd="/"
    ).stdout
    assert printed.strip() == "[True, True, False, False]"
