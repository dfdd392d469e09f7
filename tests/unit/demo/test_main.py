import os
import signal
import threading

import pytest

from proxy.demo import main
from proxy.demo.conversation import Conversation, Turn
from proxy.demo.errors import ConversationError
from proxy.demo.main import run_demo


def conversation(name, *, exact):
    first = Turn(1, "tools", 10, 5, 0, 0, 0, 0.1, "tool_calls", 1)
    second = Turn(2, "answer", 20, 5, 15, 15 if exact else 12, 0, 0.1, "stop", 0)
    return Conversation(name, (first, second))


@pytest.fixture
def server(monkeypatch):
    """Fakes a server; the test calls it with the routes that are exact."""

    def configure(*, token_exact, chat_exact=True, stock_exact=False):
        exact = {"token route": token_exact, "chat route": chat_exact, "stock chat route": stock_exact}
        monkeypatch.setattr(main, "_served_model", lambda client, url: "m")
        monkeypatch.setattr(
            main, "converse", lambda route, model, progress: conversation(route.name, exact=exact[route.name])
        )

    return configure


def demo(**options):
    return run_demo("127.0.0.1", 0, **({"serve": False, "keep_log": None, "url": "http://x/v1/"} | options))


def test_exit_code_0_when_token_and_chat_route_are_exact(server, capsys):
    server(token_exact=True, chat_exact=True, stock_exact=False)
    assert demo() == 0
    stdout = capsys.readouterr().out
    assert "token route: 1 of 1 follow-up turns exact (100%)" in stdout
    assert "\nchat route: 1 of 1 follow-up turns exact (100%)" in stdout


def test_it_ends_with_the_address_of_its_rollouts(server, monkeypatch, capsys):
    server(token_exact=True)

    def converse(route, model, progress):
        return Conversation(route.name, conversation(route.name, exact=True).turns, f"of {route.name}")

    monkeypatch.setattr(main, "converse", converse)
    assert demo() == 0
    address = capsys.readouterr().out.splitlines()[-1].split()[-1]
    assert address == (
        "http://x/viewer#/compare/of%20token%20route/-/of%20chat%20route/-/of%20stock%20chat%20route/-"
    )


def test_a_server_that_does_not_show_them_is_told_and_fails_nothing(capsys):
    main._show_rollouts("http://127.0.0.1:9", "none", ["s"], False, print)
    assert "the rollouts cannot be shown: no proxy responds" in capsys.readouterr().out


@pytest.mark.parametrize("drifting", ["token", "chat"])
def test_exit_code_1_when_a_turn_drifts(server, capsys, drifting):
    server(**{"token_exact": True, "chat_exact": True, f"{drifting}_exact": False, "stock_exact": True})
    assert demo() == 1
    assert f"{drifting} route: 0 of 1 follow-up turns exact" in capsys.readouterr().out


def test_exit_code_2_when_no_server_responds(capsys):
    assert demo(url="http://127.0.0.1:9") == 2
    captured = capsys.readouterr()
    assert "no OpenAI server responds at http://127.0.0.1:9" in captured.err
    assert captured.out == ""


def test_exit_code_2_when_a_turn_is_refused(server, monkeypatch, capsys):
    server(token_exact=True, stock_exact=True)

    def refuse(route, model, progress):
        raise ConversationError("refused")

    monkeypatch.setattr(main, "converse", refuse)
    assert demo() == 2
    assert "refused" in capsys.readouterr().err


def test_serve_and_url_exclude_each_other(capsys):
    assert demo(serve=True) == 2
    assert "--serve" in capsys.readouterr().err


def test_sigterm_interrupts_like_ctrl_c_and_restores_the_handler(server, monkeypatch, capsys):
    server(token_exact=True, stock_exact=True)
    before = signal.getsignal(signal.SIGTERM)

    def wait(route, model, progress):
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait(10)

    monkeypatch.setattr(main, "converse", wait)
    assert demo() == 130
    assert "interrupted" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) == before
