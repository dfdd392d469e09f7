"""Audits the appends that did not render the whole history.

A proof tests many conversations, but not all. So the first append of each kind of conversation, and a share
of the others, is compared with a rendering of the whole history after the prompt was planned. After one
difference, such appends with this template render the whole history.
"""

import json
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from chat_tokenizer import ChatTokenizer
from chat_tokenizer.cache import BoundedCache
from tokenproxy.base.request import Rendering
from tokenproxy.monitoring.metrics import Metrics

Messages = Sequence[Mapping[str, Any]]

log = logging.getLogger("tokenproxy")

SHARE = 0.01
"""Share of the appends that are audited, besides the first of each kind."""
MAX_WAITING = 32
"""Number of audits that may wait. Further ones are skipped: under load the share shrinks, and the proxy does
not slow down."""
_SHOWN_CHARACTERS = 2_000


class Auditor:
    """Decides which appends are audited, and audits them one at a time, off the event loop."""

    def __init__(self, metrics: Metrics, proof_folder: Path | None, share: float = SHARE) -> None:
        """Audit nothing yet.

        Args:
            proof_folder: holds the proofs, which a difference changes; None keeps them in memory.
            share: of the appends after the first of each kind, from 0 to 1.
        """
        self._metrics = metrics
        self._share = share
        self._proof_folder = proof_folder
        self._thread = ThreadPoolExecutor(1, "audit")
        self._audited_kinds: BoundedCache[object, bool] = BoundedCache(4096)
        self._waiting = 0

    def consider(
        self,
        tokenizer: ChatTokenizer,
        history: Messages,
        new: Messages,
        rendering: Rendering,
    ) -> None:
        """Audit an append later, if it is the first of its kind or drawn. Any thread may call it."""
        local = tokenizer.is_local(new, rendering.parse_template_kwargs())
        if not local or self._waiting >= MAX_WAITING:
            return
        kind = _kind(tokenizer, history, new, rendering)
        first = self._audited_kinds.get(kind) is None
        if not first and random.random() >= self._share:
            return
        self._audited_kinds.put(kind, True)
        self._waiting += 1
        refute = partial(
            tokenizer.audit,
            new,
            history,
            tools=rendering.parse_tools(),
            add_generation_prompt=rendering.add_generation_prompt,
            template_kwargs=rendering.parse_template_kwargs(),
            folder=self._proof_folder,
        )
        self._thread.submit(self._audit, refute, tokenizer.source, new)

    def close(self) -> None:
        """Drop the waiting audits, and end the thread after the running one."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _audit(self, refute: Callable[[], Messages | None], source: str, new: Messages) -> None:
        try:
            refuted = refute()
        except Exception:  # the boundary of the thread: the append itself succeeded
            log.exception("an append could not be audited")
            return
        finally:
            self._waiting -= 1
        self._metrics.audits.labels("same" if refuted is None else "different").inc()
        if refuted is not None:
            example = json.dumps({"history": refuted, "new": new}, ensure_ascii=False, default=repr)
            log.error(
                "the chat template of %s appends other text after the whole history than was proved; from "
                "now on the whole history is rendered. Smallest example found: %s",
                source,
                example[:_SHOWN_CHARACTERS],
            )


def _kind(
    tokenizer: ChatTokenizer,
    history: Messages,
    new: Messages,
    rendering: Rendering,
) -> object:
    """The kind of a conversation: length of the history, last turn, new messages, options."""
    turn = history[-1]
    return (
        tokenizer.fingerprint,
        len(history).bit_length(),
        history[0].get("role"),
        bool(turn.get("content")),
        bool(turn.get("reasoning") or turn.get("reasoning_content")),
        len(turn.get("tool_calls") or ()),
        tuple(message.get("role") for message in new[:8]),
        rendering.tools is not None,
        rendering.add_generation_prompt,
        tuple(sorted(rendering.parse_template_kwargs())),
    )
