"""Discover what an engine supports by sending it small requests."""

import asyncio
import logging
import re
from dataclasses import dataclass

import msgspec

from tokenproxy.base.errors import ApiError, EngineBroken, EngineUnavailable, Unsupported
from tokenproxy.base.evidence import ASKED
from tokenproxy.base.http import Request
from tokenproxy.base.request import PROCESSED_LOGPROBS, EngineRoute
from tokenproxy.engine.derender import DERENDER_PATH, GENERATE_PATH
from tokenproxy.engine.images import EngineImages, find_images
from tokenproxy.engine.protocol import Engine, examine, fetch
from tokenproxy.engine.token_in import (
    CHAT_PATH,
    RENDER_PATH,
    ChatTokenIn,
    GenerateTokenIn,
    TokenIn,
    json_request,
)

log = logging.getLogger("tokenproxy")

_PROBE_IDS = [1, 0, 1, 1, 0]
"""Ids that every vocabulary has, in an order that no chat template renders."""

_METRICS_TIMEOUT_S = 10.0
_CACHE = re.compile(rb"^vllm:cache_config_info\{(.*)\} ", re.MULTILINE)
_LABEL = re.compile(rb'\b(kv_cache_size_tokens|num_gpu_blocks|block_size|kv_offloading_size)="([^"]*)"')
"""Labels of that metric. The first is one from vLLM 0.27 on, at least."""

_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
_PRINTABLE: tuple[tuple[str, object], ...] = (
    ("tool_choice", "auto"),
    ("tool_choice", "required"),
    ("response_format", {"type": "json_object"}),
)
"""Chat request fields, with a value each, that some of vLLM's renderers and flags render into the prompt."""

NO_TOKEN_IN = (
    "this engine does not accept prompt ids: upgrade vLLM to a version whose /v1/chat/completions accepts "
    "`kv_transfer_params.prompt_token_ids`, or start it with --enable-scale-out"
)


class CredentialRequired(EngineUnavailable):
    """The engine refuses discovery requests without an accepted API key."""


_LOGPROBS_WARNING = (
    "its logprobs mode is {}: unless a turn is sampled at temperature 1 without top_p, top_k, min_p, "
    "penalties and logit_bias, its log-probabilities {} those of the distribution that it was sampled "
    "from: start vLLM with --logprobs-mode processed_logprobs"
)


class _Logprobs(msgspec.Struct):
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]


class _Choice(msgspec.Struct):
    logprobs: _Logprobs


class _Completion(msgspec.Struct):
    choices: list[_Choice]


@dataclass(frozen=True, slots=True)
class Model:
    """The model an engine serves, as `/v1/models` lists it."""

    name: str
    root: str
    """Folder or hub name that the engine loaded."""
    max_model_len: int | None


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an engine supports."""

    version: str
    model: Model | None
    """The base model; None if the engine lists none."""
    models: tuple[str, ...]
    """Names of all served models, including LoRA adapters."""
    token_in: TokenIn | None
    """How to send it an exact prompt; None if it does not accept one."""
    rendered_fields: frozenset[str] = frozenset()
    """Request fields that change its rendered prompt, besides messages, tools and template arguments."""
    logprobs_mode: str = ""
    """Its `--logprobs-mode`; empty if unknown."""
    images: EngineImages | None = None
    """How to send it images with exact ids; None if it takes none."""
    cache: tuple[int, int] = (0, 0)
    """Number of ids that its KV caches hold, and of those in one block, by its metrics. Both are 0 if it does
    not report them, or keeps ids elsewhere, too, that it evicts from these caches."""
    tells: frozenset[str] = frozenset()
    """Names of the facts of `ASKED` that its choices report on request."""
    parses_ids: bool = False
    """Whether its render, generate and derender routes are on: it then parses any ids as an answer."""

    @property
    def logprobs_warning(self) -> str:
        """What is wrong with its log-probabilities for training, and what to do; empty if nothing is."""
        if self.logprobs_mode == PROCESSED_LOGPROBS:
            return ""
        return _LOGPROBS_WARNING.format(
            self.logprobs_mode or "unknown", "are not" if self.logprobs_mode else "may not be"
        )

    def require_token_in(self) -> TokenIn:
        """How to send the engine an exact prompt.

        Raises:
            Unsupported: the engine accepts no exact prompts; the message names what to upgrade or enable.
        """
        if self.token_in is None:
            raise Unsupported(NO_TOKEN_IN, param="prompt_ids", code="no_token_in")
        return self.token_in

    def require_images(self) -> EngineImages:
        """How to send the engine images with exact ids.

        Raises:
            Unsupported: it takes none.
        """
        if self.images is None:
            raise Unsupported("this engine takes no images together with prompt ids", code="no_images")
        return self.images


async def discover(engine: Engine) -> Capabilities:
    """Discover an engine's version, models and how to send it an exact prompt.

    Raises:
        ApiError: the engine does not respond.
    """
    models = await list_models(engine)
    # ids that the chat route uses as its prompt come back: no chat template renders them
    asks = dict.fromkeys([fact.asked_by for fact in ASKED], True)
    ids = {"kv_transfer_params": {"prompt_token_ids": _PROBE_IDS}, **asks}
    status, completion = await _complete(engine, ids)
    if status == 500:
        raise EngineBroken(f"{engine.name} returned status 500 for {CHAT_PATH}; retrying later")
    token_in: TokenIn | None = None
    parses_ids = await _parses_ids(engine)
    if completion.get("prompt_token_ids") == _PROBE_IDS:
        token_in = ChatTokenIn()
    elif parses_ids:
        token_in = GenerateTokenIn()
    names = tuple(model.name for model in models)
    version, rendered_fields, mode, images, cache = await asyncio.gather(
        _version(engine),
        find_rendered_fields(engine),
        _logprobs_mode(engine),
        find_images(engine),
        _kv_cache(engine),
    )
    model = models[0] if models else None
    tells = _reported(completion)
    return Capabilities(
        version, model, names, token_in, rendered_fields, mode, images, cache, tells, parses_ids
    )


async def list_models(engine: Engine) -> list[Model]:
    """The models an engine serves, base model first.

    Raises:
        CredentialRequired: the engine refuses the API key, or the lack of one.
        ApiError: the engine does not respond.
    """
    status, body = await examine(engine, Request("GET", "/v1/models"))
    if status in (401, 403):
        raise CredentialRequired(
            f"{engine.name} requires an API key: set `upstream_api_key`, or send requests with a valid key"
        )
    data = _json(body).get("data") if status == 200 else None
    entries = (
        [entry for entry in data if isinstance(entry, dict) and "id" in entry]
        if isinstance(data, list)
        else []
    )
    # a LoRA adapter has its base model as parent
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
    _, body = await fetch(engine, Request("GET", "/version"))
    return str(_json(body).get("version", "unknown"))


async def find_rendered_fields(engine: Engine) -> frozenset[str]:
    """Find which fields of `_PRINTABLE` change the prompt that the engine renders.

    Sends one-token requests that differ in one field and compares their prompts. A field that the engine
    refuses cannot be in a prompt.

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
    """The prompt ids of a one-token chat request with a tool; None if the engine refuses it."""
    _, completion = await _complete(engine, {"tools": [_TOOL], "tool_choice": "none", **fields})
    return completion.get("prompt_token_ids")


async def _complete(engine: Engine, fields: dict[str, object]) -> tuple[int, dict[str, object]]:
    """Status and body of a chat completion of one token; the body is empty if the engine refuses it."""
    request = {
        "messages": [{"role": "user", "content": "."}],
        "max_tokens": 1,
        "return_token_ids": True,
        **fields,
    }
    status, body = await examine(engine, json_request(CHAT_PATH, request))
    return status, _json(body) if status == 200 else {}


def _reported(completion: dict[str, object]) -> frozenset[str]:
    """Names of the facts that a choice reports; engines that do not know one ignore the request for it."""
    choices = completion.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    return frozenset(fact.name for fact in ASKED if isinstance(first, dict) and first.get(fact.name))


async def _logprobs_mode(engine: Engine) -> str:
    """The engine's `--logprobs-mode`; empty if it can be neither asked nor measured.

    With VLLM_SERVER_DEV_MODE=1 vLLM reports it. Otherwise two ids are sampled after the same prompt, each as
    the only one that is allowed. Both processed log-probabilities are then 0. Raw ones are the model's own,
    and no model gives two ids the probability 1. Values above 0 are logits: their mode is left unknown.
    """
    status, body = await examine(engine, Request("GET", "/server_info?config_format=json"))
    config = _json(body).get("vllm_config") if status == 200 else None
    model = config.get("model_config") if isinstance(config, dict) else None
    mode = model.get("logprobs_mode") if isinstance(model, dict) else None
    if isinstance(mode, str):
        return mode
    values = [await _only_logprobs(engine, token) for token in (0, 1)]
    if not all(values) or max(map(max, values)) > 0:
        return ""
    return "raw_logprobs" if any(map(any, values)) else PROCESSED_LOGPROBS


async def _only_logprobs(engine: Engine, token: int) -> list[float]:
    """The log-probabilities of an id that alone may be sampled, and of the most likely id there."""
    fields = {"prompt": _PROBE_IDS, "max_tokens": 1, "logprobs": 1, "allowed_token_ids": [token]}
    status, body = await examine(engine, json_request(EngineRoute.COMPLETIONS, fields))
    try:
        logprobs = msgspec.json.decode(body, type=_Completion).choices[0].logprobs
        return [*logprobs.token_logprobs, *logprobs.top_logprobs[0].values()] if status == 200 else []
    except (msgspec.DecodeError, UnicodeDecodeError, IndexError):
        return []


async def _kv_cache(engine: Engine) -> tuple[int, int]:
    """See `Capabilities.cache`."""
    try:
        async with asyncio.timeout(_METRICS_TIMEOUT_S):
            status, page = await fetch(engine, Request("GET", "/metrics"))
    except (ApiError, TimeoutError):
        return 0, 0
    size = block_ids = 0
    for cache in _CACHE.findall(page) if status == 200 else ():  # of each data-parallel rank
        labels = dict(_LABEL.findall(cache))
        if labels.get(b"kv_offloading_size", b"None") != b"None":
            return 0, 0
        blocks, block_ids, ids = (
            int(value) if (value := labels.get(name, b"")).isdigit() else 0
            for name in (b"num_gpu_blocks", b"block_size", b"kv_cache_size_tokens")
        )
        # the product is wrong for models whose layers need different numbers of blocks
        size += ids or blocks * block_ids
    return size, block_ids


async def _parses_ids(engine: Engine) -> bool:
    """Whether the render, generate and derender routes all respond with status 200."""
    chat = {"messages": [{"role": "user", "content": "."}], "max_tokens": 1}
    status, _ = await examine(engine, json_request(RENDER_PATH, chat))
    if status != 200:
        return False
    generate_request = {"token_ids": _PROBE_IDS, "sampling_params": {"max_tokens": 1}}
    status, generated = await examine(engine, json_request(GENERATE_PATH, generate_request))
    if status != 200:
        return False
    derender_request = {
        "generate_response": msgspec.Raw(generated),
        "chat_request": chat,
        "prompt_token_ids": _PROBE_IDS,
    }
    status, _ = await examine(engine, json_request(DERENDER_PATH, derender_request))
    return status == 200


def _json(body: bytes) -> dict[str, object]:
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {}
    return value if isinstance(value, dict) else {}
