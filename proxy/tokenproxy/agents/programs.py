"""The environment with which programs find the proxy, the model and their session.

Every value is what the program itself documents or reads; docs/agents.md names them. Nothing is installed or
changed outside of the environment, but for a folder with Codex' settings.
"""

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from urllib.parse import urlsplit

from tokenproxy.base.files import whole_file

NO_KEY = "tokenproxy"
"""The key of a client that has none: programs do not start without one."""
SESSION_VARIABLE = "TOKENPROXY_SESSION"
"""Holds the session's name for Codex, whose settings name the variable in place of the session."""

_MOST_OUTPUT_TOKENS = 32_000
"""Claude Code's own limit of an answer."""
_OUTPUT_SHARE = 4
"""An answer may take one part in so many of the context, so that the conversation has room."""
_PROXY_VARIABLES = ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")


@dataclass(frozen=True, slots=True)
class Target:
    """A proxy, and how a program uses it."""

    url: str
    """The proxy's root, without `/v1`."""
    model: str
    max_model_len: int | None = None
    """The model's context in ids; None if unknown."""
    session: str | None = None
    """The session that records the turns; None leaves that to the program's own headers."""
    api_key: str | None = None

    @property
    def root(self) -> str:
        """The base URL without `/v1`, within the session."""
        return f"{self.url}/sessions/{self.session}" if self.session else self.url

    @property
    def output_tokens(self) -> int | None:
        """The most ids that an answer may take; None if the context is unknown."""
        return min(_MOST_OUTPUT_TOKENS, self.max_model_len // _OUTPUT_SHARE) if self.max_model_len else None


Variables = dict[str, str | None]
"""Environment variables to set, and to remove where the value is None."""


def openai_variables(target: Target) -> Variables:
    """For programs that use an OpenAI SDK, LangChain, LiteLLM, ..."""
    base = f"{target.root}/v1"
    return {
        "OPENAI_BASE_URL": base,
        "OPENAI_API_BASE": base,  # LiteLLM, and SDKs before version 1
        "OPENAI_API_KEY": target.api_key or NO_KEY,
        "OPENAI_MODEL": target.model,
    }


def claude_variables(target: Target) -> Variables:
    """For Claude Code, 2.1.273 or later."""
    variables: Variables = {
        "ANTHROPIC_BASE_URL": target.root,
        "ANTHROPIC_AUTH_TOKEN": target.api_key or NO_KEY,
        # a key of the user's own would be sent to the proxy, or another provider used
        "ANTHROPIC_API_KEY": None,
        "CLAUDE_CODE_USE_BEDROCK": None,
        "CLAUDE_CODE_USE_VERTEX": None,
        "CLAUDE_CODE_USE_FOUNDRY": None,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        # its requests say their class and agent
        "CLAUDE_CODE_GATEWAY_HINT_HEADERS": "1",
        # no block at the head of the system prompt that tells versions of the program apart
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "ANTHROPIC_MODEL": target.model,
        "CLAUDE_CODE_SUBAGENT_MODEL": target.model,
    }
    for family in ("OPUS", "SONNET", "HAIKU", "FABLE"):
        variables[f"ANTHROPIC_DEFAULT_{family}_MODEL"] = target.model
    if target.max_model_len:
        variables["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] = str(target.max_model_len)
        variables["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] = str(target.output_tokens)
    return variables


def codex_variables(target: Target) -> Variables:
    """For Codex, whose settings are a file: a folder of its own holds it, and Codex' conversations.

    Raises:
        OSError: the folder cannot be written.
    """
    return {
        "CODEX_HOME": str(_codex_home(_codex_config(target))),
        "OPENAI_API_KEY": target.api_key or NO_KEY,
        SESSION_VARIABLE: target.session,
    }


def opencode_variables(target: Target) -> Variables:
    """For OpenCode, by its inline configuration."""
    limit = {"context": target.max_model_len, "output": target.output_tokens}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "tokenproxy",
        "options": {"baseURL": f"{target.root}/v1", "apiKey": target.api_key or NO_KEY},
        "models": {
            target.model: {"name": target.model, **({"limit": limit} if target.max_model_len else {})}
        },
    }
    config = {
        "$schema": "https://opencode.ai/config.json",
        "model": f"tokenproxy/{target.model}",
        "small_model": f"tokenproxy/{target.model}",
        "provider": {"tokenproxy": provider},
    }
    return {"OPENCODE_CONFIG_CONTENT": json.dumps(config), "OPENCODE_DISABLE_AUTOUPDATE": "1"}


PROGRAMS: Mapping[str, Callable[[Target], Variables]] = {
    "claude": claude_variables,
    "codex": codex_variables,
    "opencode": opencode_variables,
    "openai": openai_variables,
}
"""The programs by the names of their commands; `openai` stands for every client of that API."""


def variables_for(programs: list[str], target: Target, environment: Mapping[str, str]) -> Variables:
    """The variables of several programs.

    Args:
        environment: what is set already.

    Raises:
        OSError: see `codex_variables`.
    """
    variables: Variables = {}
    for name in programs:
        variables |= PROGRAMS[name](target)
    if any(environment.get(name) for name in _PROXY_VARIABLES):
        host = urlsplit(target.url).hostname or ""
        for name in ("NO_PROXY", "no_proxy"):
            variables[name] = ",".join(filter(None, [environment.get(name), host]))
    return variables


def _codex_config(target: Target) -> str:
    """Codex' config.toml. It names no session, so that conversations can be resumed in another one."""
    # a JSON string is a TOML string
    lines = [
        f"model = {json.dumps(target.model)}",
        'model_provider = "tokenproxy"',
        "check_for_update_on_startup = false",
        'web_search = "disabled"',
        *([f"model_context_window = {target.max_model_len}"] if target.max_model_len else []),
        "",
        "[analytics]",
        "enabled = false",
        "",
        "[model_providers.tokenproxy]",
        # a provider with this name summarises by an ordinary turn; one named "OpenAI" by a route of its own
        'name = "tokenproxy"',
        f"base_url = {json.dumps(f'{target.url}/v1')}",
        'wire_api = "responses"',
        'env_key = "OPENAI_API_KEY"',
        f'env_http_headers = {{ "X-Session-ID" = "{SESSION_VARIABLE}" }}',
        "",
    ]
    return "\n".join(lines)


def _codex_home(config: str) -> Path:
    """The folder that holds these settings. Its name is made from them: runs with others never share it."""
    from tokenproxy.settings.groups import state_folder

    digest = blake2b(config.encode(), digest_size=6).hexdigest()
    home = state_folder() / "codex" / digest
    file = home / "config.toml"
    home.mkdir(parents=True, exist_ok=True)
    with suppress(FileNotFoundError):
        if file.read_text().startswith(config):  # Codex adds what it learns, such as trusted folders
            return home
    with whole_file(file) as new:
        new.write(config.encode())
    return home
