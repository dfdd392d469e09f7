"""The scope of ids: everything that must be equal before the ids of one turn are reused in another.

Law: two requests with equal scopes and equal messages have equal prompts, as far as the engine renders them.
"""

import hashlib
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from proxy.history.store import session_id
from proxy.history.turn import Turn
from proxy.history.vocabulary import Reason
from proxy.turn.request import Rendering
from tokenization.canonical import start

CHANGED = (
    Reason.TOOLS_CHANGED,
    Reason.TEMPLATE_KWARGS_CHANGED,
    Reason.RENDERING_CHANGED,
    Reason.MODEL_CHANGED,
)
"""The reason for each of `Scope.parts`, if that part differs."""


@dataclass(frozen=True, slots=True)
class Scope:
    """The tenant and session of a conversation, its model, and how it is rendered."""

    tenant: str
    """Digest of a verified credential; empty where no credentials are required."""
    session: str | None
    """The client's name of the session; None for conversations without one, whose name the proxy chose."""
    model: str
    """Base model or LoRA adapter."""
    rendering: Rendering
    parts: tuple[bytes, ...]
    """See `scope_parts`."""

    @property
    def rollout(self) -> str | None:
        """The rollout of the client's session, which holds all turns with keys of this scope."""
        return None if self.session is None else session_id(self.tenant, self.session)

    def key(self, kind: str, digest: bytes, *, explains: bool = False) -> bytes:
        """A key of the store's index: 16 bytes.

        Args:
            kind: what `digest` is a digest of.
            explains: leave out model and rendering: such keys only serve to explain a miss.
        """
        return bytes(self.hasher(kind, digest, explains=explains).digest())

    def hasher(self, kind: str, digest: bytes = b"", *, explains: bool = False) -> Any:
        """blake2b over the scope and a digest, which may be updated with more; see `key`."""
        tenant, session = self.tenant.encode(), (self.session or "").encode()
        lengths = (len(tenant).to_bytes(8, "little"), len(session).to_bytes(8, "little"))
        parts = () if explains else self.parts
        data = b"".join((lengths[0], tenant, lengths[1], session, *parts, digest))
        return hashlib.blake2b(data, digest_size=16, person=kind.encode())


def scope_parts(
    rendering: Rendering, rendered_fields: frozenset[str], model: str, tokenizer: str
) -> tuple[bytes, ...]:
    """Digests of tools, template arguments, other printed options, model with tokenizer; 16 bytes each.

    Args:
        rendered_fields: names in `rendering.options` that the engine's rendering prints.
        tokenizer: fingerprint of vocabulary and chat template; empty if unknown.

    Raises:
        msgspec.DecodeError: tools or template arguments have a wrong JSON type.
        InvalidMessages: they hold a value that JSON does not have.
    """
    options = {name: raw.decode() for name, raw in rendering.options.items() if name in rendered_fields}
    return (
        start(tools=rendering.parse_tools()),
        start(template_kwargs=rendering.parse_template_kwargs()),
        start(template_kwargs=options),
        start(model=f"{tokenizer}/{model}"),
    )


def raw_key(rendering: Rendering, rendered_fields: frozenset[str], model: str, tokenizer: str) -> bytes:
    """The cache key of a result of `scope_parts`: 16 bytes, a digest of its arguments."""
    key = hashlib.blake2b(digest_size=16, person=b"raw")
    options = [
        f"{name}={rendering.options[name]!r}" for name in sorted(rendered_fields & rendering.options.keys())
    ]
    texts = [text.encode() for text in (model, tokenizer, *options)]
    for part in (rendering.tools, rendering.template_kwargs, *texts):
        key.update(len(part).to_bytes(8, "little") + part)
    return key.digest()


def recorded_with(turn: Turn, tokenizer: str) -> bool:
    """Whether a turn may have been recorded with a tokenizer: False if it is known to be another one.

    Args:
        tokenizer: fingerprint of vocabulary and chat template.
    """
    if len(turn.scope) != len(CHANGED):
        return True
    names = {turn.model, turn.requested_model}
    return turn.scope[-1] in {
        start(model=f"{fingerprint}/{name}") for name in names for fingerprint in (tokenizer, "")
    }


def changed_part(before: Collection[bytes], now: Collection[bytes]) -> Reason | None:
    """The reason for the first of `Scope.parts` in which two scopes differ; None if they are equal."""
    if len(before) != len(now):
        return Reason.MODEL_CHANGED
    differing = (reason for reason, a, b in zip(CHANGED, before, now, strict=True) if a != b)
    return next(differing, None)
