"""What one engine can do, found out by asking it."""

import asyncio
import logging
from dataclasses import dataclass

import msgspec

from proxy.engine.generate import DERENDER_PATH, GENERATE_PATH, RENDER_PATH, GenerateTokenIn
from proxy.engine.protocol import Engine
from proxy.engine.token_in import CHAT_PATH, ChatTokenIn, TokenIn, json_call
from proxy.errors import ApiError, EngineBroken, EngineUnavailable, Unsupported
from proxy.http import Request

log = logging.getLogger("tokenproxy")

_PROBE_IDS = [1, 0, 1, 1, 0]
"""Ids that every vocabulary has, in an order that no template renders."""

_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
_PRINTABLE: tuple[tuple[str, object], ...] = (
    ("tool_choice", "auto"),
    ("tool_choice", "required"),
    ("response_format", {"type": "json_object"}),
)
"""Fields of a chat request, with values, that some of vLLM's renderers and flags print."""

NO_TOKEN_IN = (
    "this engine takes no prompt ids: upgrade vLLM to a version whose /v1/chat/completions honours "
    "`kv_transfer_params.prompt_token_ids`, or start it with --enable-scale-out"
)


class CredentialWanted(EngineUnavailable):
    """The engine tells nothing without an API key."""


@dataclass(frozen=True, slots=True)
class Model:
    """What `/v1/models` says about the model an engine serves."""

    name: str
    root: str
    """Folder or hub name that the engine loaded."""
    max_model_len: int | None


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an engine can do."""

    version: str
    model: Model | None
    """The base model; None if the engine lists none."""
    models: tuple[str, ...]
    """All names it serves, LoRA adapters included."""
    token_in: TokenIn | None
    """How it takes exact prompts; None if it does not."""
    printed: frozenset[str] = frozenset()
    """Request fields that its rendering prints, next to messages, tools and template arguments."""
    logprobs_mode: str = ""
    """Its `--logprobs-mode`; empty if it cannot be asked."""

    def require_token_in(self) -> TokenIn:
        """The spelling of exact prompts.

        Raises:
            Unsupported: the engine has none; the message says what to upgrade or enable.
        """
        if self.token_in is None:
            raise Unsupported(NO_TOKEN_IN, param="prompt_ids", code="no_token_in")
        return self.token_in


async def discover(engine: Engine, wanted: str = "auto") -> Capabilities:
    """Ask an engine what it is and how it takes exact prompts.

    Args:
        wanted: `auto`, or the one spelling to allow: `chat` or `generate`.

    Raises:
        ApiError: the engine does not answer.
    """
    models = await list_models(engine)
    token_in: TokenIn | None = None
    if wanted in ("auto", "chat") and await _takes_ids_in_chat(engine):
        token_in = ChatTokenIn()
    elif wanted in ("auto", "generate") and await _takes_ids_in_generate(engine):
        token_in = GenerateTokenIn()
    names = tuple(model.name for model in models)
    version, printed, mode = await asyncio.gather(
        _version(engine), printed_fields(engine), _logprobs_mode(engine)
    )
    return Capabilities(version, models[0] if models else None, names, token_in, printed, mode)


async def ask(engine: Engine, request: Request) -> tuple[int, bytes]:
    """Status and body of one request.

    Raises:
        ApiError: the engine does not answer.
    """
    answer = await engine.send(request)
    try:
        return answer.status, await answer.read()
    finally:
        await answer.aclose()


async def alive(engine: Engine) -> bool:
    """Whether the engine says it is healthy."""
    try:
        status, _ = await ask(engine, Request("GET", "/health"))
    except ApiError:
        return False
    return status == 200


async def list_models(engine: Engine) -> list[Model]:
    """The models an engine serves, base model first.

    Raises:
        CredentialWanted: the engine wants an API key, or another one.
        ApiError: the engine does not answer.
    """
    status, body = await ask(engine, Request("GET", "/v1/models"))
    if status in (401, 403):
        raise CredentialWanted(
            f"{engine.name} wants an API key: set `upstream_api_key`, or send requests with a key of its own"
        )
    data = _json(body).get("data") if status == 200 else None
    entries = (
        [entry for entry in data if isinstance(entry, dict) and "id" in entry]
        if isinstance(data, list)
        else []
    )
    entries.sort(key=lambda entry: entry.get("parent") is not None)
    return [
        Model(
            str(entry["id"]),
            str(entry.get("root") or entry["id"]),
            length if isinstance(length := entry.get("max_model_len"), int) else None,
        )
        for entry in entries
    ]


async def _version(engine: Engine) -> str:
    _, body = await ask(engine, Request("GET", "/version"))
    return str(_json(body).get("version", "unknown"))


async def printed_fields(engine: Engine) -> frozenset[str]:
    """The request fields that the engine's rendering prints, of those that some templates and flags print.

    The prompts of one-token requests that differ in one field are compared. A field that the engine refuses
    is printed in no prompt.

    Raises:
        ApiError: the engine does not respond.
    """
    baseline = await _prompt_ids(engine, {})
    if baseline is None:
        return frozenset()
    names = [name for name, _ in _PRINTABLE]
    prompts = await asyncio.gather(*(_prompt_ids(engine, {name: value}) for name, value in _PRINTABLE))
    pairs = zip(names, prompts, strict=True)
    return frozenset(name for name, prompt in pairs if prompt not in (None, baseline))


async def _prompt_ids(engine: Engine, fields: dict[str, object]) -> object:
    """The prompt of a small chat request with tools; None if the engine refuses it."""
    request = {
        "messages": [{"role": "user", "content": "."}],
        "tools": [_TOOL],
        "tool_choice": "none",
        "max_tokens": 1,
        "return_token_ids": True,
        **fields,
    }
    status, body = await ask(engine, json_call(CHAT_PATH, request))
    return _json(body).get("prompt_token_ids") if status == 200 else None


async def _logprobs_mode(engine: Engine) -> str:
    """vLLM reports its configuration only under VLLM_SERVER_DEV_MODE=1."""
    status, body = await ask(engine, Request("GET", "/server_info?config_format=json"))
    config = _json(body).get("vllm_config") if status == 200 else None
    model = config.get("model_config") if isinstance(config, dict) else None
    mode = model.get("logprobs_mode") if isinstance(model, dict) else None
    return mode if isinstance(mode, str) else ""


async def _takes_ids_in_chat(engine: Engine) -> bool:
    """Whether the chat route echoes, as its prompt, ids that no template renders."""
    request = {
        "messages": [{"role": "user", "content": "."}],
        "kv_transfer_params": {"prompt_token_ids": _PROBE_IDS},
        "max_tokens": 1,
        "return_token_ids": True,
    }
    status, body = await ask(engine, json_call(CHAT_PATH, request))
    if status in (429, 500, 502, 503, 504):
        raise EngineBroken(
            f"{engine.name} answers {status} to a chat request of one token; asking again later"
        )
    return status == 200 and _json(body).get("prompt_token_ids") == _PROBE_IDS


async def _takes_ids_in_generate(engine: Engine) -> bool:
    """Whether render, generate and derender all answer."""
    chat = {"messages": [{"role": "user", "content": "."}], "max_tokens": 1}
    status, _ = await ask(engine, json_call(RENDER_PATH, chat))
    if status != 200:
        return False
    generate = {"token_ids": _PROBE_IDS, "sampling_params": {"max_tokens": 1}}
    status, generated = await ask(engine, json_call(GENERATE_PATH, generate))
    if status != 200:
        return False
    derender = {
        "generate_response": msgspec.Raw(generated),
        "chat_request": chat,
        "prompt_token_ids": _PROBE_IDS,
    }
    status, _ = await ask(engine, json_call(DERENDER_PATH, derender))
    return status == 200


def _json(body: bytes) -> dict[str, object]:
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {}
    return value if isinstance(value, dict) else {}
