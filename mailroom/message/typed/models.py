"""What holds a pydantic model, by pydantic. Imported only for a type that does."""

from decimal import Decimal
from functools import cached_property
from typing import Any

from msgspec import to_builtins
from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticInvalidForJsonSchema
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import core_schema, to_jsonable_python

from mailroom.errors import EncodeError
from mailroom.message.typed.converter import NATIVE, Schema, lists_and_text_keys, path, type_name


class Models:
    """pydantic's models and dataclasses, and whatever holds them. Fields go by their aliases."""

    def __init__(self, value_type: Any) -> None:
        self._adapter: TypeAdapter[Any] = TypeAdapter(value_type)

    def read(self, plain: Any) -> Any:
        """See `Converter.read`."""
        # The adapter's own methods, here and below, would pass on a dozen arguments that are not given: 2 us of 9.
        return self._adapter.validator.validate_python(plain)

    def write(self, value: Any) -> Any:
        """See `Converter.write`."""
        dumped = self._adapter.serializer.to_python(value, by_alias=True, round_trip=True, warnings="error")
        return lists_and_text_keys(to_builtins(dumped, builtin_types=NATIVE, enc_hook=_plain))

    def fault(self, error: Exception) -> str:
        """See `Converter.fault`."""
        if not isinstance(error, ValidationError):
            return "value does not fit"
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        return f"{path(first['loc'], self._names)} {'is missing' if first['type'] == 'missing' else 'does not fit'}"

    def schema(self, prefix: str) -> Schema:
        """See `Converter.schema`."""
        try:
            schema = self._adapter.json_schema(ref_template=f"{prefix}{{model}}", schema_generator=_AsSent)
        except PydanticInvalidForJsonSchema:
            return {}, {}
        return schema, schema.pop("$defs", {})

    @cached_property
    def _names(self) -> frozenset[str]:
        try:
            return frozenset(_properties(self._adapter.json_schema()))
        except PydanticInvalidForJsonSchema:  # pydantic cannot tell, so none is shown
            return frozenset()


class _AsSent(GenerateJsonSchema):
    """Decimals and bytes as Mailroom's JSON has them, and not as pydantic's would."""

    def decimal_schema(self, schema: core_schema.DecimalSchema) -> dict[str, Any]:
        return {"type": "number"}

    def bytes_schema(self, schema: core_schema.BytesSchema) -> dict[str, Any]:
        return {"type": "string", "contentEncoding": "base64"}

    def encode_default(self, dft: Any) -> Any:
        return float(dft) if isinstance(dft, Decimal) else super().encode_default(dft)


def _properties(schema: Any) -> set[str]:
    """Return the names of all fields in a JSON schema."""
    if isinstance(schema, list):
        return {name for part in schema for name in _properties(part)}
    if not isinstance(schema, dict):
        return set()
    own = schema.get("properties")
    return {*(own if isinstance(own, dict) else ()), *(name for part in schema.values() for name in _properties(part))}


def _plain(item: Any) -> Any:
    """Take over where msgspec does not know the type: URLs, paths and the like are pydantic's own."""
    if hasattr(item, "get_secret_value"):
        raise EncodeError(
            f"Cannot send this value: it holds a {type_name(type(item))}, of which pydantic writes asterisks. Give its "
            "field a serializer.",
            code="MR-value-masked",
        )
    return to_jsonable_python(item)
