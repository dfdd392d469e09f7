"""Images that clients send are decoded completely; what is wrong with them is told."""

import base64
import io

import pytest
from PIL import Image as Pillow

from tokenproxy.base import images
from tokenproxy.base.images import FORMATS, InvalidImage, decode_image


def _file(kind: str = "PNG", size: tuple[int, int] = (30, 20)) -> bytes:
    out = io.BytesIO()
    Pillow.radial_gradient("L").resize(size).save(out, kind)
    return out.getvalue()


def _url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


@pytest.mark.parametrize("kind", FORMATS)
def test_an_image_is_named_by_its_bytes(kind: str) -> None:
    data = _file(kind)
    image = decode_image(_url(data))
    assert (image.kind, image.data) == (f"image/{kind.lower()}", data)
    assert decode_image(base64.b64encode(data).decode()) == image
    assert decode_image(_url(data, "image/jpg")) == image  # the file itself tells its kind
    assert decode_image(image.url) == image
    assert decode_image(_url(_file(kind, (31, 20)))).digest != image.digest


@pytest.mark.parametrize(
    "value, problem",
    [
        ("", "empty"),
        ("data:image/png,AAAA", "must be"),
        ("é", "base64"),
        (_url(b"GIF89a"), "damaged"),
        (_url(_file()[:-30]), "damaged"),
        (_url(b"<svg/>", "image/svg+xml"), "not one of"),
        (_url(_file("PPM")), "not one of"),
        (_url(b"\x00" * (20 * 2**20 + 1)), "more than 20971520 bytes"),
        (_url(_file(size=(301, 200))), "301 x 200 pixels"),
    ],
)
def test_what_is_wrong_with_an_image_is_told(
    monkeypatch: pytest.MonkeyPatch, value: str, problem: str
) -> None:
    monkeypatch.setattr(images, "MAX_PIXELS", 60_000)
    with pytest.raises(InvalidImage, match=problem) as refused:
        decode_image(value)
    assert " at 0x" not in str(refused.value)
