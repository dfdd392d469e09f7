"""Free ports for servers."""

import socket

import pytest

from tokenproxy.app.children import free_port


def test_a_free_port_is_none_that_a_connection_of_a_client_gets() -> None:
    ports = {free_port("127.0.0.1") for _ in range(20)}
    assert len(ports) > 1 and max(ports) < 32_768
    with socket.create_server(("127.0.0.1", next(iter(ports)))):  # it is free
        pass


def test_a_host_that_is_not_of_this_machine_has_no_free_port() -> None:
    with pytest.raises(OSError, match=r"192\.0\.2\.254.*no free port"):
        free_port("192.0.2.254")
