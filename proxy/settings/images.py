"""Settings of images in requests."""

from typing import Annotated

from pydantic import BaseModel, Field, field_validator
from pydantic_settings import NoDecode

from proxy.settings.flags import Flag
from proxy.settings.lists import split


class ImageSettings(BaseModel):
    """Limits of images that are sent with exact ids."""

    image_bytes: Annotated[int, Flag(default="20 MiB")] = Field(
        default=20 * 2**20, ge=1, description="largest image, in bytes of its file"
    )
    image_pixels: int = Field(
        default=64_000_000,
        ge=1,
        le=178_956_970,  # Pillow opens none that is larger
        description="largest image, in pixels: width times height",
    )
    image_hosts: Annotated[list[str], NoDecode, Flag("HOST")] = Field(
        default=[], description="hosts from which images are loaded by their URL; by default from none"
    )
    image_timeout_s: float = Field(default=10.0, gt=0, description="seconds that loading an image may take")

    @field_validator("image_hosts", mode="before")
    @classmethod
    def _split_hosts(cls, value: object) -> object:
        return split(value)
