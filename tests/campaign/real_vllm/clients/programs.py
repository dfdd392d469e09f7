"""Runs a program that prints JSON, without keeping the event loop of the test waiting."""

import asyncio
import json
from typing import Any


async def run_program(*arguments: object) -> Any:
    """The last line of a program's output, decoded. Fails with what it wrote to stderr."""
    process = await asyncio.create_subprocess_exec(
        *map(str, arguments), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    output, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    return json.loads(output.splitlines()[-1])
