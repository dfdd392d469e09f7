"""Keeps proofs in files, so that a template is examined once on a machine and not once in each process."""

import json
import logging
import os
import tempfile
from contextlib import suppress
from pathlib import Path

from tokenization.locality import Locality, Proof

log = logging.getLogger("tokenproxy")


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
    """Store a proof. What another process refuted in the meantime stays refuted.

    A folder that cannot be written is logged: the proof is then made again next time.
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
        # written elsewhere and renamed: another process never reads half of a file
        handle, temporary = tempfile.mkstemp(dir=folder, suffix=".part")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(content, file, ensure_ascii=False)
        Path(temporary).replace(folder / f"{key}.json")
    except (OSError, ValueError) as error:
        log.warning("what was proved of a chat template cannot be kept in %s: %s", folder, error)
        if temporary is not None:
            with suppress(OSError):
                Path(temporary).unlink()
