"""Bridges: messages to another broker and from one. What both sides of the form agree on knows no broker."""

from typing import TYPE_CHECKING, Any

from mailroom.packages.lazy import imported

if TYPE_CHECKING:
    from mailroom.bridges.arrival import Arrived, Intake
    from mailroom.bridges.bridges import AsyncBridges, Bridges
    from mailroom.bridges.broker import ApiBinding, Broker, OwnSetting, PublishesTo, TakesFrom, brokers
    from mailroom.bridges.publisher import (
        BrokerRefused,
        BrokerTrouble,
        Fenced,
        Numbered,
        Numbering,
        OutBridge,
        Partitioned,
        Publisher,
        RecordRefused,
    )
    from mailroom.bridges.record import Form, Record
    from mailroom.bridges.settings import InSettings, OutSettings
    from mailroom.bridges.source import (
        BrokerPosition,
        BrokerWasAway,
        InBridge,
        PartsChanged,
        PositionGone,
        RecordSource,
    )
    from mailroom.bridges.states import BridgeStates, InState, OutState

__all__ = [
    "ApiBinding",
    "Arrived",
    "AsyncBridges",
    "BridgeStates",
    "Bridges",
    "Broker",
    "BrokerPosition",
    "BrokerRefused",
    "BrokerTrouble",
    "BrokerWasAway",
    "Fenced",
    "Form",
    "InBridge",
    "InSettings",
    "InState",
    "Intake",
    "Numbered",
    "Numbering",
    "OutBridge",
    "OutSettings",
    "OutState",
    "OwnSetting",
    "Partitioned",
    "PartsChanged",
    "PositionGone",
    "Publisher",
    "PublishesTo",
    "Record",
    "RecordRefused",
    "RecordSource",
    "TakesFrom",
    "brokers",
]

# Imported on demand: what stands below imports other modules of this package.
_HOMES = {
    "mailroom.bridges.arrival": ("Arrived", "Intake"),
    "mailroom.bridges.bridges": ("AsyncBridges", "Bridges"),
    "mailroom.bridges.broker": ("ApiBinding", "Broker", "OwnSetting", "PublishesTo", "TakesFrom", "brokers"),
    "mailroom.bridges.publisher": (
        "BrokerRefused",
        "BrokerTrouble",
        "Fenced",
        "Numbered",
        "Numbering",
        "OutBridge",
        "Partitioned",
        "Publisher",
        "RecordRefused",
    ),
    "mailroom.bridges.record": ("Form", "Record"),
    "mailroom.bridges.settings": ("InSettings", "OutSettings"),
    "mailroom.bridges.source": (
        "BrokerPosition",
        "InBridge",
        "BrokerWasAway",
        "PartsChanged",
        "PositionGone",
        "RecordSource",
    ),
    "mailroom.bridges.states": ("BridgeStates", "InState", "OutState"),
}


def __getattr__(name: str) -> Any:
    return imported(__name__, _HOMES, name)
