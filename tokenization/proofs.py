"""Keeps proofs in files, so that a template is examined once on a machine and not once in each process."""

import json
import logging
import os
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tokenization.keys import digest
from tokenization.locality import PROOF_VERSION, Locality, Proof

log = logging.getLogger("tokenproxy")


def proof_key(
    chat_template: str,
    added_ids: Mapping[str, int],
    stop_ids: Iterable[int],
    content_format: str | None,
    default_template_kwargs: Mapping[str, Any],
) -> str:
    """32 hexadecimal digits: a digest of all that a proof depends on.

    Args:
        added_ids: the id of each added token.
    """
    parts = (
        PROOF_VERSION,
        chat_template,
        sorted(added_ids.items()),
        sorted(stop_ids),
        content_format,
        dict(default_template_kwargs),
        [version(name) for name in ("jinja2", "transformers")],
    )
    return digest(*parts).hex()


def load_proof(folder: Path, key: str) -> Proof | None:
    """The stored proof of a key; None if there is none that can be read."""
    try:
        fields = json.loads((folder / f"{key}.json").read_text("utf-8"))
        return Proof(
            Locality(fields["after_results"]), Locality(fields["after_messages"]), str(fields["reason"])
        )
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def store_proof(folder: Path, key: str, proof: Proof) -> None:
    """Store a proof. Refutations that another process stored in the meantime are kept.

    If the folder cannot be written, that is logged, and the next process makes the proof again.
    """
    stored = load_proof(folder, key)
    proof = proof if stored is None else proof.and_refuted_in(stored)
    content = {
        "after_results": str(proof.after_results),
        "after_messages": str(proof.after_messages),
        "reason": proof.reason,
    }
    temporary = None
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # written to a temporary file and renamed, so that another process never reads half of a file
        handle, temporary = tempfile.mkstemp(dir=folder, suffix=".part")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(content, file, ensure_ascii=False)
        Path(temporary).replace(folder / f"{key}.json")
    except (OSError, ValueError) as error:
        log.warning("the results of examining a chat template cannot be stored in %s: %s", folder, error)
        if temporary is not None:
            with suppress(OSError):
                Path(temporary).unlink()
