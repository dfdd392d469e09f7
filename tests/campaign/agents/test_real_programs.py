"""Claude Code and Codex themselves understand the environment that `tokenproxy run` gives them."""

from pathlib import Path

from tests.campaign.agents.installed import CLAUDE, CODEX, needs, run_program
from tests.campaign.agents.scripted import ANSWER, MODEL, scripted

_BARE = ["--bare", "--system-prompt", "You are terse.", "--tools", ""]


@needs(CLAUDE)
def test_claude_code(tmp_path: Path) -> None:
    with scripted(32768) as server:
        for text in (["Name a colour"], ["--continue", "Another"]):
            assert ANSWER in run_program(
                server.url, tmp_path / "home", "run-7", str(CLAUDE), "-p", *text, *_BARE
            )
        first, second = server.seen
    assert first.path == "/sessions/run-7/v1/messages?beta=true"
    assert (first.body["model"], first.body["max_tokens"]) == (MODEL, 8192)
    assert first.headers["authorization"] == "Bearer tokenproxy"
    assert first.headers["x-claude-code-request-class"] == "main"
    assert first.headers["x-claude-code-session-id"] == second.headers["x-claude-code-session-id"]
    assert "x-anthropic-billing-header" not in str(first.body["system"])
    assert ANSWER in str(second.body["messages"])


@needs(CODEX)
def test_codex(tmp_path: Path) -> None:
    with scripted(32768) as server:
        for text in (["Name a colour"], ["resume", "--last", "Another"]):
            printed = run_program(
                server.url, tmp_path / "home", "run-7", str(CODEX), "exec", "--skip-git-repo-check", *text
            )
            assert ANSWER in printed
        first, second = server.seen
    assert first.path == "/v1/responses"
    assert first.body["model"] == MODEL
    assert first.headers["x-session-id"] == second.headers["x-session-id"] == "run-7"
    assert first.headers["session-id"] == first.headers["thread-id"] == second.headers["session-id"]
    assert first.headers["authorization"] == "Bearer tokenproxy"
    assert "web_search" not in [tool["type"] for tool in first.body["tools"]]
    assert ANSWER in str(second.body["input"])
