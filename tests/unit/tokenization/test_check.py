"""The findings of `tokenproxy check` about templates."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from proxy.cli import main
from tests.support.templates.families import template_files
from tokenization.check import Report, check, load_for_check, table

_QWEN = str(template_files()["qwen3"])


@pytest.fixture(scope="module")
def report_of() -> Callable[[str], Report]:
    return lambda name: check(load_for_check(str(template_files()[name])))


@pytest.mark.parametrize(
    "name, expected",
    [
        (
            "qwen3",
            {
                "close": "<|im_end|>\n",
                "tool_close": "<|im_end|>\n",
                "stop_tokens": ["<|im_end|>"],
                "opening_stops": [],
                "before_user": "<|im_start|>user\n",
                "after_user": "<|im_end|>\n<|im_start|>assistant\n",
                "thinking_stripped": True,
            },
        ),
        ("glm4moe", {"close": "", "stop_tokens": [], "opening_stops": ["<|user|>", "<|observation|>"]}),
        ("gptoss", {"tool_close": "<|call|>", "stop_tokens": ["<|return|>", "<|end|>", "<|call|>"]}),
        (
            "cohere2",
            {"close": "<|END_RESPONSE|><|END_OF_TURN_TOKEN|>", "stop_tokens": ["<|END_OF_TURN_TOKEN|>"]},
        ),
        ("llama3_1", {"close": "<|eot_id|>", "append_only": True, "thinking_stripped": None}),
    ],
)
def test_report_of_a_template(
    report_of: Callable[[str], Report], name: str, expected: dict[str, Any]
) -> None:
    report = report_of(name).as_dict()
    assert {key: report[key] for key in expected} == expected


def test_refused_shapes_have_a_reason(report_of: Callable[[str], Report]) -> None:
    shapes = {shape.name: shape for shape in report_of("gemma3").shapes}
    assert shapes["content, user"].exact
    assert "roles must alternate" in shapes["tool call, result"].reason


def test_table_has_a_row_for_each_shape(report_of: Callable[[str], Report]) -> None:
    report = report_of("gemma3")
    text = table(report)
    assert "<end_of_turn>" in text
    assert all(shape.name in text for shape in report.shapes)


@pytest.mark.parametrize("name, code", [("qwen3", 0), ("gemma3", 1)])
def test_command_exits_with_0_only_if_all_shapes_are_exact(
    name: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(template_files()[name]), "--json"]) == code
    report = json.loads(capsys.readouterr().out)
    assert all(shape["exact"] for shape in report["shapes"]) is (code == 0)


def test_command_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", _QWEN]) == 0
    assert "tool call, result         exact" in capsys.readouterr().out


def test_command_reports_a_model_that_cannot_be_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(tmp_path / "nothing")]) == 2
    assert "cannot load a tokenizer" in capsys.readouterr().err
