"""The findings of `tokenproxy check` about templates."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.templates.families import template_files
from tokenproxy.cli.main import main


@pytest.mark.parametrize(
    "name, code, expected",
    [
        ("qwen3_instruct_2507", 0, {"close": "<|im_end|>", "stop_tokens": ["<|im_end|>"]}),
        (
            "glm4moe",
            0,
            {
                "close": "",
                "stop_tokens": [],
                "opening_stops": ["<|user|>", "<|observation|>"],
                "thinking_stripped": True,
            },
        ),
        ("gemma3", 1, {"close": "<end_of_turn>", "append_only": True, "thinking_stripped": None}),
    ],
)
def test_command_exits_with_0_only_if_all_shapes_are_exact(
    name: str, code: int, expected: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(template_files()[name]), "--json"]) == code
    report = json.loads(capsys.readouterr().out)
    assert {key: report[key] for key in expected} == expected
    assert all(shape["exact"] for shape in report["shapes"]) is (code == 0)
    assert all(shape["exact"] or shape["reason"] for shape in report["shapes"])


def test_command_prints_a_table_with_the_reasons(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["check", str(template_files()["gemma3"])])
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "tool call, result" in line and "roles must alternate" in line]
    # as some of Mistral's older models have it, which transformers does not read
    (tmp_path / "tokenizer.model.v7").write_bytes(b"")
    assert main(["check", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "cannot load a tokenizer" in error and "needs a tokenizer.json or a tekken.json" in error
