"""The commands `tokenproxy run` and `tokenproxy env`."""

import argparse
import os
import secrets
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import httpx

from tokenproxy.agents.child import NOT_EXECUTABLE, NOT_FOUND, Ended, run_child
from tokenproxy.agents.programs import PROGRAMS, Target, Variables, variables_for
from tokenproxy.base.errors import UsageError
from tokenproxy.base.urls import LOCAL_URL, normalise_base_url
from tokenproxy.client import (
    AccessDenied,
    Client,
    KeyRefused,
    ModelInfo,
    NoResponse,
    ProxyError,
    SessionInfo,
    SessionSampleList,
    UnknownResource,
    UnreadableResponse,
)

T = TypeVar("T")

_KEY = "TOKENPROXY_API_KEY"
_SECRETS = frozenset({"TOKENPROXY_ADMIN_KEY", "TOKENPROXY_UPSTREAM_API_KEY", "TOKENPROXY_STORE"})


def run_env(options: argparse.Namespace) -> int:
    """Print the environment of a program, to be sourced; returns the exit code.

    Raises:
        UsageError: there is no such proxy or model.
    """
    if options.session is None and (
        options.metadata or options.max_tokens or options.temperature is not None
    ):
        raise UsageError("--max-tokens, --temperature and --metadata describe a session: add --session NAME")
    with _connected(options) as client:
        target = _target(options, client, options.session)
        if options.session:
            target = replace(target, api_key=_save_session(options, client, options.session))
    for name, value in _variables([options.program], target).items():
        print(f"unset {name}" if value is None else f"export {name}={shlex.quote(value)}")
    return 0


def run_command(options: argparse.Namespace) -> int:
    """Run a command with its environment, print what was recorded; returns the command's exit code.

    Raises:
        UsageError: there is no command, or no such proxy or model; nothing was run.
    """
    command: list[str] = options.arguments[1:] if options.arguments[:1] == ["--"] else options.arguments
    if not command:
        raise UsageError("no command: pass one after --, as in `tokenproxy run -- claude -p 'Fix the test'`")
    name = options.session or _new_name(command)
    with _connected(options) as client:
        target = _target(options, client, name)
        target = replace(target, api_key=_save_session(options, client, name))
        before = _earlier(options, client, name) if options.session else None
        options.programs = options.programs or _programs_of(command)
        secrets_gone = _without_secrets(options, target.api_key)
        environment = _environment(secrets_gone | _variables(options.programs, target))
        _say(f"session {name} of {target.url}, model {target.model}")
        try:
            ended = run_child(command, environment)
        except OSError as error:
            _say(f"{command[0]}: {error.strerror}")
            return NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE
        _report(options, client, name, before, ended)
    return ended.code


def _connected(options: argparse.Namespace) -> Client:
    """A client of the proxy. Environment variables for HTTP proxies do not apply. Raises UsageError."""
    url = options.url or os.environ.get("TOKENPROXY_URL") or LOCAL_URL
    try:
        options.url = normalise_base_url(url)
    except ValueError as error:
        raise UsageError(str(error)) from error
    options.api_key = options.api_key or os.environ.get(_KEY, "").partition(",")[0] or None
    if options.api_key and not (options.api_key.isascii() and options.api_key.isprintable()):
        raise UsageError("the API key holds characters that no header can hold: see --api-key")
    return Client(options.url, api_key=options.api_key, http=httpx.Client(trust_env=False))


def _target(options: argparse.Namespace, client: Client, session: str | None) -> Target:
    """The proxy with the model that programs use. Raises UsageError."""
    model = _model(_ask(options, client.models), options.model)
    return Target(options.url, model.id, model.max_model_len, session, options.api_key)


def _model(models: Sequence[ModelInfo], name: str | None) -> ModelInfo:
    """The named model, else the base model. Raises UsageError."""
    base = next((model for model in models if model.parent is None), None)
    if base is None:
        raise UsageError("the proxy serves no model yet: wait until its /ready responds with 200")
    if name is None:
        return base
    found = next((model for model in models if model.id == name), None)
    if found is None:
        served = ", ".join(model.id for model in models)
        raise UsageError(f"the model {name!r} is not served: pass --model with one of {served}")
    if found.max_model_len is None:  # an adapter has the context of its base model
        return ModelInfo(id=found.id, parent=found.parent, max_model_len=base.max_model_len)
    return found


def _save_session(options: argparse.Namespace, client: Client, name: str) -> str | None:
    """Create the session, or change its description. Raises UsageError.

    Returns its key, which can do nothing but take turns of it; None where the proxy has no keys.
    """
    overrides: dict[str, Any] = {}
    if options.max_tokens is not None:
        overrides["max_tokens"] = options.max_tokens
    if options.temperature is not None:
        overrides["temperature"] = options.temperature
    metadata = dict(_condition(text) for text in options.metadata)
    session = _ask(
        options,
        lambda: client.create_session(name, overrides=overrides or None, metadata=metadata or None),
    )
    return session.key or options.api_key


def _without_secrets(options: argparse.Namespace, key: str | None) -> Variables:
    """What to remove from the environment of a program that has the key of a session, and perhaps a shell."""
    if key == options.api_key:
        return {}
    keys = {options.api_key, *os.environ.get(_KEY, "").split(",")} - {""}
    secret: Variables = {
        name: None
        for name, value in os.environ.items()
        if name.upper() in _SECRETS or keys & {value, *value.split(",")}
    }
    return {**secret, _KEY: key} if _KEY in os.environ else secret


def _condition(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise UsageError(f"--metadata must be KEY=VALUE, not {text!r}")
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise UsageError(f"--metadata must be UTF-8, not {text!r}")
    return key, value


def _earlier(options: argparse.Namespace, client: Client, name: str) -> SessionInfo | None:
    """What a session holds already; None if it may not be read. Raises UsageError."""

    def read() -> SessionInfo | None:
        try:
            return client.session(name)
        except AccessDenied:
            return None

    return _ask(options, read)


def _ask(options: argparse.Namespace, call: Callable[[], T]) -> T:
    """The result of a call of the client. Raises UsageError that says what to do."""
    url = options.url
    try:
        return call()
    except (NoResponse, UnicodeError) as error:  # a host that no name server can be asked for
        raise UsageError(
            f"no proxy at {url}: start one with `tokenproxy serve --upstream URL` or "
            f"`tokenproxy vllm MODEL`, or pass --url URL ({error})"
        ) from error
    except KeyRefused as error:
        raise UsageError(f"the proxy at {url} requires a key: pass --api-key KEY ({error})") from error
    except (UnknownResource, UnreadableResponse) as error:
        raise UsageError(f"the server at {url} is no tokenproxy: pass --url URL ({error})") from error
    except ProxyError as error:
        raise UsageError(f"the proxy at {url} refused: {error}") from error


def _variables(programs: list[str], target: Target) -> Variables:
    try:
        return variables_for(programs, target, os.environ)
    except OSError as error:
        raise UsageError(f"the folder for Codex' settings cannot be written: {error}") from error


def _programs_of(command: Sequence[str]) -> list[str]:
    """The program that a command starts; all of them for a script, which may start any."""
    name = Path(command[0]).name
    return [name] if name in PROGRAMS else list(PROGRAMS)


def _environment(variables: Variables) -> dict[str, str]:
    """The environment of this process, changed."""
    kept = {name: value for name, value in os.environ.items() if name not in variables}
    return kept | {name: value for name, value in variables.items() if value is not None}


def _new_name(command: Sequence[str]) -> str:
    """A session's name that says what ran and when: `claude-20260102-030405-6789ab`."""
    letters = "".join(each for each in Path(command[0]).name if each.isascii() and each.isalnum())
    return f"{letters[:40] or 'run'}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"


def _report(
    options: argparse.Namespace, client: Client, name: str, earlier: SessionInfo | None, ended: Ended
) -> None:
    """Print what was recorded, and set the reward. Whatever fails here, the command's exit code stays."""
    _say(f"the command ended with exit code {ended.code} after {ended.seconds:.1f} s")
    reward = None
    try:
        if options.reward_from_exit_code:
            reward = 1.0 if ended.code == 0 else 0.0
            client.set_reward(name, reward)
        session, samples = client.session(name), client.samples(name)
    except AccessDenied as error:
        _say(f"recorded in session {name}, which this key may not read: {error}")
        return
    except ProxyError as error:
        _say(f"what was recorded in session {name} is not known: {error}")
        return
    before = {turn["id"] for turn in earlier.turns} if earlier else set()
    if session.turns:
        print(_table(session, samples, before, reward), file=sys.stderr)
    if refusals := session.refusals - (earlier.refusals if earlier else 0):
        _say(f"{refusals} requests refused, the last one: {session.last_refusal}")
    if before.issuperset(turn["id"] for turn in session.turns):
        if not refusals:
            _say(
                "nothing was recorded: the command sent no request to the proxy, or none that succeeded. "
                f"`tokenproxy env {'|'.join(options.programs)}` shows what it should read; the proxy's log "
                "shows what it sent"
            )
    elif reward is None:
        _say(f'set a reward: POST {options.url}/v1/sessions/{name}/reward {{"reward": 1.0}}')


def _table(
    session: SessionInfo, samples: SessionSampleList, before: Collection[str], reward: float | None
) -> str:
    """The counts of a session as lines of text.

    Args:
        before: the ids of turns that were there before the command ran.
        reward: what the exit code gave; None if it gives none.
    """
    turns = session.turns
    sampled = sum(turn["completion_tokens"] for turn in turns)
    aborted = sum(turn["finish_reason"] == "abort" for turn in turns)
    new = sum(turn["id"] not in before for turn in turns)
    words = [f"{sampled} ids sampled"]
    words += [f"{new} turns are new"] if new != len(turns) else []
    words += [f"{aborted} aborted"] if aborted else []
    rendered = Counter(
        turn["reason"] for turn in turns if not turn["parent"] and _continues(turn["messages"])
    )
    children = Counter(turn["parent"] for turn in turns if turn["parent"])
    extended, again = children.total(), rendered.total()
    classes = Counter(turn.get("request_class") or "unknown" for turn in turns)
    refused = Counter(leaf["reason"] for leaf in samples.refused)
    trained = sum(sum(sample["loss_mask"]) for sample in samples.samples)
    rows: list[tuple[str, Any, str]] = [
        ("turns", len(turns), "; ".join(words)),
        ("exact", extended, f"of {extended + again} that continue a conversation"),
        ("  rendered", again, _counts(rendered)),
        ("roots", len(turns) - extended, f"conversations; {extended - len(children)} forks"),
        ("agents", len(session.agents), f"turns by class: {_counts(classes)}"),
        ("samples", len(samples.samples), f"{trained} ids to train on"),
        ("  refused", refused.total(), _counts(refused)),
    ]
    lines = [row for row in rows if row[1] or not row[0].startswith(" ")]
    if reward is not None:
        lines.append(("reward", f"{reward:g}", "from the exit code"))
    return "\n".join(f"  {name:<10} {value:>8}  {text}".rstrip() for name, value, text in lines)


def _continues(messages: Sequence[Any]) -> bool:
    """Whether the messages of a prompt hold an assistant's: without one it begins a conversation."""
    return any(isinstance(each, dict) and each.get("role") == "assistant" for each in messages)


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counter.most_common())


def _say(message: str) -> None:
    print(f"tokenproxy: {message}", file=sys.stderr, flush=True)
