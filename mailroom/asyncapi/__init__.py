"""AsyncAPI: a document of typed topics and of a node's bridges, for those who write to them or read from them."""

from mailroom.asyncapi.describing import document

__all__ = ["document"]
