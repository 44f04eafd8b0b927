"""JSON schemas of typed topics as AsyncAPI takes them: those of draft 7.

msgspec and pydantic write a later draft. Of what they use, draft 7 says differently what a tuple is. AsyncAPI also has
a `discriminator` of another form; it only helps, since each choice says itself which values are its own.
"""

from typing import Any

from mailroom.message.topic import Topic, topic_schema

PLACE = "#/components/schemas/"
DATA = ("const", "default", "enum", "examples", "required")
NAMED = ("properties", "patternProperties", "definitions")


def name_of(topic: Topic[Any, Any]) -> str:
    """Return the name of a topic's values among the schemas; no two topics have the same, nor two versions."""
    return f"{topic.name}-v{topic.version}"


def schemas_of(topic: Topic[Any, Any]) -> dict[str, Any]:
    """Return the schema of a topic's values under `name_of`, and those that it refers to, which begin with that."""
    name = name_of(topic)
    schema, parts = topic_schema(topic, f"{PLACE}{name}.")
    return {name: draft_7(schema)} | {f"{name}.{part}": draft_7(each) for part, each in parts.items()}


def draft_7(schema: Any) -> Any:
    """Return a schema, or a list of some, as draft 7 has it."""
    if isinstance(schema, list):
        return [draft_7(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("format") == "decimal":
        return {"type": "number"}  # so Mailroom's JSON has it, and msgspec's has text
    found: dict[str, Any] = {}
    for name, value in schema.items():
        if name in DATA:
            found[name] = value
        elif name in NAMED:
            found[name] = {each: draft_7(inner) for each, inner in value.items()}
        elif name == "prefixItems":
            found["items"] = draft_7(value)
        elif name == "items" and "prefixItems" in schema:
            found["additionalItems"] = draft_7(value)
        elif name != "discriminator":
            found[name] = draft_7(value)
    return found
