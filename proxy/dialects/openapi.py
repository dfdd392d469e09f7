"""What the OpenAPI page shows of the requests of a route."""

from typing import Any

Schema = dict[str, Any]

IDS: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
"""Token ids."""


def request_body(description: str, properties: Schema) -> Schema:
    """A required body: an object with some of its fields.

    Args:
        description: what the other fields are.
    """
    schema = {"type": "object", "description": description, "properties": properties}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
