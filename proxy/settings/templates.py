"""Settings of tokenizer and chat template."""

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field, field_validator

from proxy.settings.flags import Flag
from proxy.settings.folders import state_folder


def default_proof_folder() -> Path:
    """A folder in the user's state folder, for all processes of this machine."""
    return state_folder() / "proofs"


class TemplateSettings(BaseModel):
    """How messages become ids."""

    tokenizer: Annotated[str | None, Flag("NAME", default="the engines' model")] = Field(
        default=None, description="folder or hub name of the tokenizer"
    )
    chat_template: Annotated[Path | None, Flag("FILE")] = Field(
        default=None, description="Jinja file; needed if the engine runs with --chat-template"
    )
    trust_remote_code: bool = Field(
        default=False, description="run Python code from the tokenizer's repository"
    )
    proof_folder: Annotated[Path, Flag("DIR", default="~/.local/state/tokenproxy/proofs")] = Field(
        default_factory=default_proof_folder,
        description="folder for the results of examining chat templates, shared by all processes",
    )
    audit_share: Annotated[float, Flag("SHARE")] = Field(
        default=0.01,
        ge=0,
        le=1,
        description="share of appends compared with a rendering of the whole history, and the first of each "
        "kind; 0 for none",
    )
    encoder_threads: int = Field(default=2, ge=1, description="threads that tokenise")

    @field_validator("chat_template", mode="after")
    @classmethod
    def _exists(cls, file: Path | None) -> Path | None:
        if file is not None and not file.is_file():
            raise ValueError(f"no file at {file}")
        return file
