"""A server that looks like a proxy to `tokenproxy run`, and answers Claude Code and Codex with one word."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

ANSWER = "Turquoise."
MODEL = "scripted"
_SESSION = {
    "id": "s",
    "explicit": True,
    "ambiguous": False,
    "created": 1.0,
    "used": 1.0,
    "turn_count": 0,
    "bytes": 0,
    "defaults": {},
    "overrides": {},
    "metadata": {},
}


@dataclass(frozen=True, slots=True)
class Seen:
    """A request of a program."""

    path: str
    headers: dict[str, str]
    """By their names in lower case."""
    body: dict[str, Any]


@dataclass(slots=True)
class Scripted:
    """The server."""

    url: str = ""
    seen: list[Seen] = field(default_factory=list)
    """The requests for turns."""


@contextmanager
def scripted(max_model_len: int) -> Iterator[Scripted]:
    """Serve until the block ends."""
    server = Scripted()
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._send(b"", "text/plain")

        def do_GET(self) -> None:
            if self.path == "/v1/models":
                model = {"id": MODEL, "parent": None, "max_model_len": max_model_len}
                self._json({"data": [model]})
            elif self.path.partition("?")[0].endswith("/samples"):
                self._json({"samples": [], "refused": []})
            else:
                self._json(_SESSION)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers.get("content-length", 0))) or b"{}")
            if self.path == "/v1/sessions":
                self._json(_SESSION)
                return
            headers = {name.lower(): value for name, value in self.headers.items()}
            with lock:
                server.seen.append(Seen(self.path, headers, body))
                number = len(server.seen)
            events = _messages(number) if "/messages" in self.path else _responses(number)
            stream = "".join(f"event: {each['type']}\ndata: {json.dumps(each)}\n\n" for each in events)
            self._send(stream.encode(), "text/event-stream")

        def _json(self, value: Any) -> None:
            self._send(json.dumps(value).encode(), "application/json")

        def _send(self, body: bytes, kind: str) -> None:
            self.send_response(200)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    served = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=served.serve_forever, daemon=True)
    thread.start()
    server.url = f"http://127.0.0.1:{served.server_address[1]}"
    try:
        yield server
    finally:
        served.shutdown()
        served.server_close()
        thread.join()


def _messages(number: int) -> list[dict[str, Any]]:
    """One answer in Anthropic's events."""
    usage = {
        "input_tokens": 5,
        "output_tokens": 2,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
    }
    message: dict[str, Any] = {
        "id": f"msg_{number}",
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage,
    }
    text = {"type": "text_delta", "text": ANSWER}
    stop = {"stop_reason": "end_turn", "stop_sequence": None}
    return [
        {"type": "message_start", "message": message},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": text},
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": stop, "usage": usage},
        {"type": "message_stop"},
    ]


def _responses(number: int) -> list[dict[str, Any]]:
    """One answer in the events of Responses."""
    content = [{"type": "output_text", "text": ANSWER, "annotations": []}]
    item = {
        "type": "message",
        "id": f"msg_{number}",
        "role": "assistant",
        "status": "completed",
        "content": content,
    }
    response = {"id": f"resp_{number}", "object": "response", "model": MODEL, "output": []}
    usage = {
        "input_tokens": 5,
        "output_tokens": 2,
        "total_tokens": 7,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens_details": {"reasoning_tokens": 0},
    }
    return [
        {"type": "response.created", "response": {**response, "status": "in_progress"}},
        {"type": "response.output_item.added", "output_index": 0, "item": {**item, "content": []}},
        {"type": "response.output_item.done", "output_index": 0, "item": item},
        {
            "type": "response.completed",
            "response": {**response, "status": "completed", "output": [item], "usage": usage},
        },
    ]
