"""Claude Code and Codex, unmodified, on a real vLLM: every prompt begins with the ids before it."""

import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.conftest import Server
from tests.campaign.agents.installed import CLAUDE, CODEX, needs, run_command
from tests.campaign.agents.recorded import Turn, check_tree
from tests.campaign.real_vllm.conftest import START_TIMEOUT_S, only_in_front, only_inside
from tokenproxy.client import Client

pytestmark = pytest.mark.timeout(START_TIMEOUT_S + 600)
# Turns are likely to end, and to repeat nothing: both programs repeat a request whose answer was cut off.
OVERRIDES: dict[str, Any] = {
    **{"max_tokens": 400, "temperature": 0.7, "frequency_penalty": 0.5},
    "logit_bias": {"2": 4},
}
_END_OF_REASONING = 12
"""Id of `</think>` in the tokenizer of the acceptance tests' engines."""
_THINKING: dict[str, Any] = {
    "chat_template_kwargs": {"thinking": True},
    "logit_bias": {"2": 5, str(_END_OF_REASONING): 17},
}
NO_THINKING: dict[str, Any] = {"chat_template_kwargs": {"thinking": False, "enable_thinking": False}}
_TEXTS = ("Name a colour.", "And another?", "Which one is warmer?", "Thanks.")


def claude_turns(tools: str) -> Iterator[list[object]]:
    """The commands of a conversation; with these flags its first prompt is short."""
    for number, text in enumerate(_TEXTS):
        more = ["--continue"] if number else []
        yield [CLAUDE, *more, "-p", text, "--bare", "--system-prompt", "You are terse.", "--tools", tools]


def codex_turns(folder: Path) -> Iterator[list[object]]:
    """The commands of a conversation; `folder` is for a file of its instructions."""
    instructions = folder / "instructions.md"
    instructions.write_text("You are terse.")
    for number, text in enumerate(_TEXTS):
        more = ["resume", "--last"] if number else []
        settings = ["--skip-git-repo-check", "-c", f"model_instructions_file={instructions}"]
        yield [CODEX, "exec", *more, *settings, text]


def _converse(
    server: Server, home: Path, commands: Iterator[Sequence[object]], **overrides: Any
) -> tuple[str, list[Turn]]:
    """Run commands in a new session, one after the other; returns its name and its turns."""
    session = f"agent-{secrets.token_hex(4)}"
    home.mkdir()
    with Client(server.url) as client:
        client.create_session(session, overrides=OVERRIDES | overrides)
        for command in commands:
            # a summary would begin a new conversation
            run_command(server.url, home, session, *command, patience_s=400, DISABLE_AUTO_COMPACT="1")
        return session, list(client.session(session, ids=True).turns)


def _check(server: Server, session: str) -> None:
    """All turns are exact, by the engine's own counts; only the first one continues none.

    A program may leave a turn out, and continue one before it: Claude Code does after an empty answer.
    """
    turns, generated = check_tree(server.url, session)
    assert len(turns) >= len(_TEXTS)
    assert [turn["reason"] for turn in turns] == ["first_turn", *[None] * (len(turns) - 1)]
    counts = [(turn["prompt_tokens"], turn["completion_tokens"]) for turn in turns]
    assert counts == [(len(prompt), len(sampled)) for prompt, sampled in generated]


def _is_visible(turn: Turn) -> bool:
    """Whether it has text or a call. If not, Claude Code replaces it by words of its own, or asks again."""
    message = turn["message"]
    return bool((message.get("content") or "").strip() or message.get("tool_calls"))


@needs(CLAUDE)
@only_inside
@pytest.mark.parametrize("thinks", [False, True], ids=["with a tool", "that thinks"])
def test_claude_code(server: Server, tmp_path: Path, thinks: bool) -> None:
    """The thinking of earlier turns stays in the prompt, as it was sampled."""
    for attempt in range(8):
        home, commands = tmp_path / f"home-{attempt}", claude_turns("" if thinks else "Bash")
        session, turns = _converse(server, home, commands, **(_THINKING if thinks else NO_THINKING))
        thoughts = [turn for turn in turns[:-1] if turn["message"].get("reasoning")]
        if all(map(_is_visible, turns)) and (thoughts or not thinks):
            break
    _check(server, session)
    assert bool(thoughts) is thinks
    assert all(_END_OF_REASONING in turn["completion_ids"] for turn in thoughts)


@needs(CODEX)
@only_in_front
def test_codex(server: Server, tmp_path: Path) -> None:
    session, _ = _converse(server, tmp_path / "home", codex_turns(tmp_path))
    _check(server, session)
