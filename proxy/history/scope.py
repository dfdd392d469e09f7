"""What ids mean: everything that must be equal for the ids of one turn to be reused in another.

Law: two requests with equal scopes and equal messages have equal prompts, as far as the engine renders them.
"""

import hashlib
from collections.abc import Collection
from dataclasses import dataclass

from proxy.history.vocabulary import Reason
from proxy.turn.request import Rendering
from tokenization.canonical import start

CHANGED = (
    Reason.TOOLS_CHANGED,
    Reason.TEMPLATE_KWARGS_CHANGED,
    Reason.RENDERING_CHANGED,
    Reason.MODEL_CHANGED,
)
"""For each of `Scope.parts` the reason if it differs."""


@dataclass(frozen=True, slots=True)
class Scope:
    """Whose conversation it is, with which model, rendered how."""

    tenant: str
    """Digest of a verified credential; empty where nobody asks for credentials."""
    session: str | None
    """As a client named it; None for conversations without a session, whatever name the proxy chose."""
    model: str
    """Base model or LoRA adapter."""
    rendering: Rendering
    parts: tuple[bytes, ...]
    """See `scope_parts`."""

    def key(self, kind: str, digest: bytes, *, explains: bool = False) -> bytes:
        """A key of the store's index: 16 bytes.

        Args:
            kind: what `digest` is a digest of.
            explains: leave model and rendering out: such keys only explain why nothing was found.
        """
        key = hashlib.blake2b(digest_size=16, person=kind.encode())
        for part in (self.tenant.encode(), (self.session or "").encode()):
            key.update(len(part).to_bytes(8, "little") + part)
        key.update(b"".join([*(() if explains else self.parts), digest]))
        return key.digest()


def scope_parts(
    rendering: Rendering, printed: frozenset[str], model: str, tokenizer: str
) -> tuple[bytes, ...]:
    """Digests of tools, template arguments, other printed options, model with tokenizer; 16 bytes each.

    Args:
        printed: names in `rendering.options` that the engine's rendering prints.
        tokenizer: fingerprint of vocabulary and chat template; empty if unknown.

    Raises:
        msgspec.DecodeError: tools or template arguments are not the JSON they should be.
        InvalidMessages: they hold what JSON has not.
    """
    options = {name: raw.decode() for name, raw in rendering.options.items() if name in printed}
    return (
        start(tools=rendering.parse_tools()),
        start(template_kwargs=rendering.parse_template_kwargs()),
        start(template_kwargs=options),
        start(model=f"{tokenizer}/{model}"),
    )


def raw_key(rendering: Rendering, printed: frozenset[str], model: str, tokenizer: str) -> bytes:
    """16 bytes for the arguments of `scope_parts` as they are spelled: what its result is cached by."""
    key = hashlib.blake2b(digest_size=16, person=b"raw")
    options = [f"{name}={rendering.options[name]!r}" for name in sorted(printed & rendering.options.keys())]
    texts = [text.encode() for text in (model, tokenizer, *options)]
    for part in (rendering.tools, rendering.template_kwargs, *texts):
        key.update(len(part).to_bytes(8, "little") + part)
    return key.digest()


def changed_part(before: Collection[bytes], now: Collection[bytes]) -> Reason | None:
    """Which part of two scopes differs, the first of `Scope.parts` that does; None if none."""
    if len(before) != len(now):
        return Reason.MODEL_CHANGED
    differing = (reason for reason, a, b in zip(CHANGED, before, now, strict=True) if a != b)
    return next(differing, None)
