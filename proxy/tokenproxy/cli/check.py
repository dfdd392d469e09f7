"""`tokenproxy check`: what can be appended exactly with a chat template, or on a running server."""

import argparse
import asyncio
import json

from chat_tokenizer import TokenizerUnavailable
from chat_tokenizer.check import Report, check, load_for_check, table
from tokenproxy.base.errors import ApiError, UsageError
from tokenproxy.engine.discovery import list_models
from tokenproxy.engine.http import HttpEngine
from tokenproxy.fleet.tokenizers import Tokenizers


def run_check(options: argparse.Namespace) -> int:
    """Print the report; returns the exit code.

    Raises:
        UsageError: there is no such model, template or server.
    """
    source, upstream = options.source, options.upstream
    if source is None and upstream is None:
        raise UsageError("name a model or a template, or a running server with --upstream URL")
    try:
        if upstream is None:
            report = check(load_for_check(source))
        else:
            report = asyncio.run(_check_server(upstream, options.api_key, source))
    except TokenizerUnavailable as error:
        raise UsageError(str(error)) from error
    except ApiError as error:
        raise UsageError(error.message) from error
    print(json.dumps(report.as_dict(), ensure_ascii=False, indent=2) if options.json else table(report))
    return 0 if report.exact else 1


async def _check_server(url: str, api_key: str | None, source: str | None) -> Report:
    """The report about how a running vLLM renders. Raises ApiError."""
    engine = HttpEngine(url, api_key)
    try:
        models = await list_models(engine)
        tokenizer = await Tokenizers(source).find(engine, models[0] if models else None)
        # on a thread, because the engine may be the one that renders
        return await asyncio.to_thread(check, tokenizer)
    finally:
        await engine.aclose()
