"""The command `tokenproxy view`: recorded sessions as one HTML file."""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from chat_tokenizer import ChatTokenizer, TokenizerUnavailable
from tokenproxy.base.errors import BadRequest, UsageError
from tokenproxy.base.files import whole_file
from tokenproxy.cli.export import STDOUT, chosen_store, progress_bar
from tokenproxy.monitoring.logs import configure_logs
from tokenproxy.record.store import Store, StoreError
from tokenproxy.samples.export import ExportRefused, chosen_rollouts
from tokenproxy.settings import Settings, load_settings
from tokenproxy.viewer.exported import NotAnExport, read_export
from tokenproxy.viewer.page import single_file
from tokenproxy.viewer.recording import PageData, RecordedSession, add_recording
from tokenproxy.viewer.served import ViewError, page_from_server
from tokenproxy.web.parameters import check_name

_WRONG_USE = (BadRequest, ExportRefused, NotAnExport, TokenizerUnavailable, ValueError)
_NO_TOKENIZER = "pass --tokenizer MODEL to see the texts of the ids"


def run_view(options: argparse.Namespace) -> int:
    """Write the page; returns the exit code.

    Raises:
        UsageError: the flags contradict each other, or name nothing that exists; nothing was written.
    """
    _check_flags(options)
    try:
        if options.serve:
            return _serve(options)
        if options.url:
            names = [check_name(name, "SESSION") for name in options.target]
            data = page_from_server(
                options.url, options.api_key, progress_bar(names, unit=" sessions", desc="view")
            )
        else:
            data = _from_recordings(options)
        out = Path(options.output or _default_name(options.target))
        if out.exists() and not out.is_file():
            raise UsageError(f"{out} is not a regular file: pass another -o FILE")
        if out.exists() and any(out.samefile(target) for target in options.target if Path(target).is_file()):
            raise UsageError(f"{out} is read, and the page would replace it: pass another -o FILE")
        with whole_file(out) as file:
            file.write(single_file(data).encode())
    except _WRONG_USE as error:
        raise UsageError(str(error)) from error
    except (ViewError, StoreError, OSError) as error:
        print(f"tokenproxy: {error}", file=sys.stderr)
        return 1
    count = len(data.sessions)
    sessions = "1 session" if count == 1 else f"{count} sessions"
    print(f"{out.resolve().as_uri()}  ({sessions}, {out.stat().st_size / 1e6:.1f} MB)")
    return 0


def _check_flags(options: argparse.Namespace) -> None:
    """Raises UsageError: the flags contradict each other, or one cannot be used."""
    for name in ("store", "tokenizer", "chat_template"):
        if options.url and getattr(options, name):
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(f"{flag} has no effect with --url: the proxy has its own; leave out one of them")
    if options.api_key and not options.url:
        raise UsageError("--api-key is for a running proxy: pass --url too")
    if options.api_key and not (options.api_key.isascii() and options.api_key.isprintable()):
        raise UsageError("--api-key must be printable ASCII characters")
    if options.serve and (options.url or options.output or len(options.target) > 1):
        raise UsageError("--serve takes one store, and neither --url nor -o: leave out the rest")
    if not options.serve and not options.target:
        raise UsageError("no session: name one, or a file of `tokenproxy export`, or pass --serve to see all")
    if options.output in ("", STDOUT):
        raise UsageError("-o must name a file: the page is written to no other place")


def _serve(options: argparse.Namespace) -> int:
    """Serve the viewer of a store; what keys and other settings a proxy of it has does not matter."""
    from tokenproxy.app.view_app import serve_store  # the web server takes long to import

    for target in options.target:
        options.store = target if ":" in target else f"sqlite:{target}"
    chosen_store(options)
    store = load_settings(options.config, store=options.store).store
    settings = Settings(store=store, store_required=True, port=options.port)
    configure_logs("warning", "text")
    return serve_store(settings, _tokenizer(options))


def _tokenizer(options: argparse.Namespace) -> ChatTokenizer | None:
    return ChatTokenizer.load(options.tokenizer, _template(options)) if options.tokenizer else None


def _default_name(targets: Sequence[str]) -> str:
    return f"{Path(targets[0]).stem if Path(targets[0]).is_file() else targets[0]}.html"


def _from_recordings(options: argparse.Namespace) -> PageData:
    """The data of sessions of a store, and of files that were exported."""
    tokenizer = _tokenizer(options)
    files = [Path(target) for target in options.target if Path(target).is_file()]
    names = [target for target in options.target if not Path(target).is_file()]
    if missing := [name for name in names if Path(name).suffix in (".jsonl", ".parquet")]:
        raise UsageError(f"there is no file {missing[0]}: pass one of `tokenproxy export`, or a session's id")
    recordings = [recording for file in files for recording in read_export(file)]
    if names:
        recordings += asyncio.run(_read_store(chosen_store(options), names))
    page = PageData()
    for recording in progress_bar(recordings, unit=" sessions", desc="view"):
        add_recording(page, recording, tokenizer, "" if tokenizer else _NO_TOKENIZER)
    page.fold()
    return page


def _template(options: argparse.Namespace) -> str | None:
    return options.chat_template.read_text() if options.chat_template else None


async def _read_store(store: Store, names: Sequence[str]) -> list[RecordedSession]:
    await store.open()
    try:
        recordings = []
        for rollout in await chosen_rollouts(store, names):
            session = await store.session(rollout)
            if session is not None:
                recordings.append(RecordedSession(session, await store.turns(rollout), session.rewards))
        return recordings
    finally:
        await store.aclose()
