"""Settings of logging."""

from typing import Literal

from pydantic import BaseModel, Field


class LogSettings(BaseModel):
    """What the proxy reports."""

    log_level: Literal["debug", "info", "warning", "error"] = Field(default="info", description="log level")
    log_format: Literal["text", "json"] = Field(
        default="text", description="log lines as text, or as one JSON object each"
    )
    access_log: bool = Field(default=False, description="log a line for each request, at level info")
