"""A fake vLLM on a real socket, with the wire formats of the real one; `fake_server` has its faults.

It samples the ids it is told to, and renders with plain transformers, so that nothing under test checks
itself.
"""

import json
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from enum import StrEnum
from typing import Any

from aiohttp import web

from tests.support.fake_completions import completed_chunks_of, completed_of, prompts_of
from tests.support.fake_scale_out import (
    derendered_chunk_of,
    derendered_of,
    generated_chunks_of,
    generated_of,
    generation_name,
    refused_by_derender,
    sampling_of,
)
from tests.support.fake_server import FakeServer, Seen, respond
from tests.support.fake_wire import (
    Canned,
    Reply,
    as_rendered,
    chunks_of,
    completion_of,
    data_of,
    error_body,
    event_of,
    label_weights,
    tools_as_rendered,
)
from tests.support.tiny_model import HI, TinyModel

__all__ = [
    "BACKGROUND",
    "MAX_MODEL_LEN",
    "Canned",
    "FakeVllm",
    "Reply",
    "Seen",
    "Variant",
    "as_rendered",
    "data_of",
    "error_body",
    "tools_as_rendered",
]

MAX_MODEL_LEN = 4096
_TOO_LONG = (
    "This model's maximum context length is {1} tokens. However, your prompt contains {0} "
    "input tokens, which exceeds this limit even without any output tokens. Please reduce the length of the "
    "input prompt. (parameter=input_tokens, value={0})"
)
_TOO_LONG_TO_GENERATE = (
    "The decoder prompt (length {0}) is longer than the maximum model length of {1}. Make "
    "sure that `max_model_len` is no smaller than the number of text tokens."
)
_SCALE_OUT_PATHS = ("/v1/chat/completions/render", "/inference/v1/generate", "/v1/chat/completions/derender")
_SAMPLING_PATHS = ("/v1/chat/completions", "/inference/v1/generate", "/v1/completions")
BACKGROUND = {
    "/health",
    "/metrics",
    "/is_paused",
    "/weight_info",
    "/server_info",
    "/version",
    "/v1/models",
    "/tokenize",
}
"""What the proxy asks an engine at any time, for itself."""


class Variant(StrEnum):
    """How this engine takes exact prompts."""

    CHAT = "chat"
    """In `kv_transfer_params.prompt_token_ids` of the chat route."""
    SCALE_OUT = "generate"
    """By the scale-out routes; the chat route ignores the ids."""
    NEITHER = "none"
    """Not at all: scale-out routes answer 403, as vLLM does without --enable-scale-out."""


def _for_one_id(seen: Seen) -> bool:
    """Whether the proxy itself samples one id, to examine an engine; no test samples one."""
    if seen.path not in _SAMPLING_PATHS:
        return False
    fields = seen.json
    return bool(fields.get("sampling_params", fields).get("max_tokens") == 1)


class _TemplateRefused(Exception):
    """The template refuses the messages, or fails on them."""


class FakeVllm(FakeServer):
    """An engine that serves one small model and one adapter."""

    max_model_len = MAX_MODEL_LEN

    def __init__(
        self,
        model: TinyModel,
        variant: Variant = Variant.CHAT,
        *,
        port: int = 0,
        api_keys: Sequence[str] = (),
    ) -> None:
        self.model = model
        self.variant = variant
        self.api_keys = tuple(api_keys)
        """Empty where it asks for none."""
        self._generations: dict[str, Reply] = {}
        self._rendering = threading.Lock()
        super().__init__(port)

    def reset(self) -> None:
        """Forget what was seen, and serve as a healthy engine again."""
        super().reset()
        self.root = str(self.model.folder)
        """What /v1/models says was loaded."""
        self.chat_template: str | None = None
        """What it was started with; None for the model's own."""
        self.names = ["tiny", "adapter"]
        self.rendered_fields: tuple[str, ...] = ()
        """Request fields that its rendering prints, as some of vLLM's renderers do."""
        self.only_logprobs = {0: [-9.15, -2.67], 1: [-22.76, -2.67]}
        """By id: its log-probability where only it may be sampled, and those of the most likely ids there.
        These are raw ones of SmolLM2."""
        self.weight_versions: list[dict[str, Any]] | None = None
        """The spans that each choice reports if asked to, as vLLM 0.33 does; None for an earlier release."""
        self.facts: dict[tuple[str, str], Callable[[list[int]], Any]] = {}
        """What it reports of the ids of a choice or of a piece of one, by its name and what asks for it."""
        self.healthy = True
        self.replies: deque[Reply] = deque()
        """Scripts for the next generations, which then go as `usual`."""
        self.usual = Reply()

    def generations(self, *paths: str) -> list[Seen]:
        """The requests of clients that sample, oldest first; those for one id are the proxy's own.

        Args:
            paths: of the routes; by default all that sample.
        """
        return [seen for seen in self.from_clients() if seen.path in (paths or _SAMPLING_PATHS)]

    def from_clients(self, since: int = 0) -> list[Seen]:
        """The requests after the first `since` that the proxy cannot have made for itself, oldest first."""
        return [
            seen for seen in self.requests[since:] if seen.path not in BACKGROUND and not _for_one_id(seen)
        ]

    def last(self, path: str = "/v1/chat/completions") -> Seen:
        """The newest request for a path that is none of the proxy's own for one id."""
        return [seen for seen in self.seen(path) if not _for_one_id(seen)][-1]

    def _allowed(self, seen: Seen) -> bool:
        """vLLM guards these prefixes only."""
        guarded = self.api_keys and seen.path.startswith(("/v1", "/inference"))
        return not guarded or seen.header("authorization") in [
            f"Bearer {key}".encode() for key in self.api_keys
        ]

    async def _answer(self, request: web.Request, seen: Seen) -> web.StreamResponse:
        if seen.path in _SCALE_OUT_PATHS and self.variant is not Variant.SCALE_OUT:
            message = (
                "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them."
            )
            return _error(403, message, "PermissionDeniedError")
        route = _ROUTES.get((seen.method, seen.path))
        if route is None:
            return respond(Canned(b'{"detail":"Not Found"}', 404, {"content-type": "application/json"}))
        handler: Callable[[web.Request, Seen], Awaitable[web.StreamResponse]] = getattr(self, route)
        try:
            return await handler(request, seen)
        except _TemplateRefused as refused:
            return _error(400, str(refused), "BadRequestError")

    async def _health(self, request: web.Request, seen: Seen) -> web.StreamResponse:
        return web.Response(status=200 if self.healthy else 503)

    async def _version(self, request: web.Request, seen: Seen) -> web.StreamResponse:
        return web.json_response({"version": "0.32.0+fake"})

    async def _models(self, request: web.Request, seen: Seen) -> web.StreamResponse:
        base, *adapters = self.names
        first = {"id": base, "root": self.root, "parent": None, "max_model_len": self.max_model_len}
        others = [{"id": name, "root": "/lora", "parent": base, "max_model_len": None} for name in adapters]
        # the base model last: whoever wants it must look at `parent`
        return web.json_response({"object": "list", "data": [*others, first]})

    async def _tokenize(self, request: web.Request, seen: Seen) -> web.StreamResponse:
        body = seen.json
        ids = self._render(body) if "messages" in body else self.model.encode(body["prompt"])
        strings = self.model.reference.convert_ids_to_tokens(ids) if body.get("return_token_strs") else None
        return web.json_response(
            {"count": len(ids), "max_model_len": self.max_model_len, "tokens": ids, "token_strs": strings}
        )

    async def _detokenize(self, request: web.Request, seen: Seen) -> web.StreamResponse:
        return web.json_response({"prompt": self.model.decode(seen.json["tokens"])})

    def _render(self, body: dict[str, Any]) -> list[int]:
        rendered = {name: body[name] for name in self.rendered_fields if body.get(name) not in (None, "none")}
        kwargs = dict(body.get("chat_template_kwargs") or {})
        if (effort := body.get("reasoning_effort")) is not None:
            kwargs = {"enable_thinking": effort != "none", **kwargs, "reasoning_effort": effort}
        messages = body["messages"] if self.model.renders_requests else as_rendered(body["messages"])
        if body.get("continue_final_message"):
            kwargs["continue_final_message"] = True
        with self._rendering:
            try:
                return (self.model.encode(json.dumps(rendered)) if rendered else []) + self.model.render(
                    messages,
                    **{
                        **kwargs,
                        "add_generation_prompt": body.get("add_generation_prompt", True),
                        "tools": tools_as_rendered(body.get("tools")),
                        "chat_template": self.chat_template,
                    },
                )
            except Exception as error:  # a template is a program; vLLM answers 400 to whatever it raises
                raise _TemplateRefused(str(error)) from error

    async def _chat(self, request: web.Request, seen: Seen) -> web.StreamResponse:
        body = seen.json
        given: list[int] | None = (body.get("kv_transfer_params") or {}).get("prompt_token_ids")
        prompt = given if given is not None and self.variant is Variant.CHAT else self._render(body)
        refusal = self._refusal(body, prompt, "kv_transfer_params.prompt_token_ids")
        if refusal is not None:
            return refusal
        reply = self._next_reply(prompt, body.get("max_tokens"))
        return await self._send(request, body, reply, (completion_of, chunks_of), prompt)

    async def _send(
        self,
        request: web.Request,
        body: dict[str, Any],
        reply: Reply,
        formats: tuple[Callable[..., Any], Callable[..., Any]],
        prompt: Sequence[Any],
        scripts: Sequence[Reply] = (),
    ) -> web.StreamResponse:
        """Send a generation, whole or as a stream; `scripts` are those of a request with several prompts."""
        if reply.error is not None:
            return respond(reply.error)
        whole, chunks = formats
        made = (chunks if body.get("stream") else whole)(self.model, scripts or reply, prompt, body)
        if self.weight_versions is not None and body.get("return_weight_versions"):
            made = list(made) if body.get("stream") else made
            label_weights(made if isinstance(made, list) else [made], self.weight_versions)
        asked = {name: of for (name, ask), of in self.facts.items() if body.get(ask)}
        if asked:
            made = list(made) if body.get("stream") else made
            for choice in (
                choice for part in (made if isinstance(made, list) else [made]) for choice in part["choices"]
            ):
                choice |= {name: of(choice.get("token_ids") or []) for name, of in asked.items()}
        if body.get("stream"):
            return await self._finish(request, reply, [*map(event_of, made), b"data: [DONE]\n\n"])
        return await self._finish(request, reply, [json.dumps(made).encode()], "application/json")

    def _refusal(self, body: dict[str, Any], prompt: list[int], param: str) -> web.Response | None:
        model = body.get("model")
        if model is not None and model not in self.names:
            return _error(404, f"The model `{model}` does not exist.", "NotFoundError", "model")
        if any(token >= self.model.vocab_size for token in prompt):
            message = f"Token id {max(prompt)} is out of vocabulary (parameter={param})"
            return _error(400, message, "BadRequestError", param)
        if len(prompt) > self.max_model_len:
            count, most = len(prompt), self.max_model_len
            if param == "token_ids":
                return _error(400, _TOO_LONG_TO_GENERATE.format(count, most), "BadRequestError")
            return _error(400, _TOO_LONG.format(count, most), "BadRequestError", "input_tokens")
        return None

    def _next_reply(self, prompt: list[int], max_tokens: int | None) -> Reply:
        """How a generation after a prompt goes."""
        if max_tokens == 1:  # a probe: scripts are for the requests of tests
            return Reply(ids=HI[:1])
        return self.replies.popleft() if self.replies else self.usual

    async def _render_chat(self, request: web.Request, seen: Seen) -> web.StreamResponse:
        body = seen.json
        refusal = self._refusal(body, [], "")
        if refusal is not None:
            return refusal
        prompt = self._render(body)
        passed = ("stream", "stream_options", "model", "cache_salt", "priority", "kv_transfer_params")
        return web.json_response(
            {
                "request_id": f"chatcmpl-{len(self.requests)}",
                "token_ids": prompt,
                "sampling_params": sampling_of(body, self.max_model_len - len(prompt)),
                "reasoning_ended": True,
                "output_mode": "tokens",
                **{name: body[name] for name in passed if name in body},
            }
        )

    async def _generate(self, request: web.Request, seen: Seen) -> web.StreamResponse:
        body = seen.json
        prompt, sampling = body["token_ids"], body["sampling_params"]
        refusal = self._refusal(body, prompt, "token_ids")
        if refusal is not None:
            return refusal
        reply = self._next_reply(prompt, sampling.get("max_tokens"))
        self._generations[generation_name(body)] = reply
        return await self._send(request, body, reply, (generated_of, generated_chunks_of), prompt)

    async def _complete(self, request: web.Request, seen: Seen) -> web.StreamResponse:
        body = seen.json
        prompts = prompts_of(self.model, body["prompt"])
        for prompt in prompts:
            if (refusal := self._refusal(body, prompt, "prompt")) is not None:
                return refusal
        for token in body.get("allowed_token_ids", ()):
            own, *top = self.only_logprobs[token]
            logprobs = {"token_logprobs": [own], "top_logprobs": [dict(enumerate(top or [own]))]}
            return web.json_response({"choices": [{"logprobs": logprobs}]})
        replies = [self._next_reply(prompt, body.get("max_tokens")) for prompt in prompts]
        formats = (completed_of, completed_chunks_of)
        return await self._send(request, body, replies[0], formats, prompts, replies)

    async def _derender(self, request: web.Request, seen: Seen) -> web.StreamResponse:
        body = seen.json
        if refusal := refused_by_derender(body):
            return _error(400, refusal, "BadRequestError")
        made = derendered_chunk_of if body.get("stream") else derendered_of
        name = (body.get("generate_response") or body.get("generate_chunk"))["request_id"]
        # ids that it did not sample have no script
        return web.json_response(made(self.model, self._generations.get(name, self.usual), body))


_ROUTES = {  # by name, so that a subclass may replace one
    ("GET", "/health"): "_health",
    ("GET", "/version"): "_version",
    ("GET", "/v1/models"): "_models",
    ("POST", "/tokenize"): "_tokenize",
    ("POST", "/detokenize"): "_detokenize",
    ("POST", "/v1/chat/completions"): "_chat",
    ("POST", "/v1/chat/completions/render"): "_render_chat",
    ("POST", "/inference/v1/generate"): "_generate",
    ("POST", "/v1/completions"): "_complete",
    ("POST", "/v1/chat/completions/derender"): "_derender",
}


def _error(status: int, message: str, kind: str, param: str | None = None) -> web.Response:
    headers = {"content-type": "application/json"}
    return respond(Canned(error_body(message, kind, param, status), status, headers))


def script(engines: Sequence[FakeVllm], *replies: Reply) -> None:
    """How the next generations go, whichever of the engines gets them."""
    shared = deque(replies)
    for engine in engines:
        engine.replies = shared
