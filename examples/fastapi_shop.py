"""A web service with FastAPI: an order and the command about it are committed together, before the response goes out.

Create the inbox once, then run the service, and beside it a dispatcher. The worker of the inbox `shop` runs in the
service: it starts and ends with it, and `/health` tells whether it does its work.

    mailroom inbox create shop
    uvicorn --factory examples.fastapi_shop:create_app
"""

import os
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Annotated, Any

from fastapi import Depends, FastAPI, HTTPException, Request, Response
from pydantic import BaseModel
from sqlalchemy import Connection, create_engine, text
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from inbox import Handlers, Message, Worker
from mailroom import Topic, carrying
from outbox import Outbox

TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


class Base(DeclarativeBase):
    """The tables of this service."""


class Order(Base):
    """An order, until the warehouse has answered: `new`."""

    __tablename__ = "shop_order"
    id: Mapped[int] = mapped_column(primary_key=True)
    state: Mapped[str]


class Reserve(BaseModel):
    """What the warehouse is asked for, and what the web's callers send."""

    item: str
    amount: int


outbox = Outbox()
reserve = Topic("stock.reserve", Reserve, replies=dict[str, int])
shop = Handlers()


@shop.on("shop")
def reserved(message: Message, connection: Any) -> None:
    """The warehouse has reserved: the order, whose number is the key, goes on."""
    _set_state(connection, int(message.key), "reserved")


@shop.on_error_reply("shop")
def refused(message: Message, connection: Any) -> None:
    """The warehouse has refused."""
    _set_state(connection, int(message.key), "refused")


def _set_state(connection: Any, order: int, state: str) -> None:
    if isinstance(connection, Connection | Session):  # the worker is on the service's engine
        connection.execute(text("UPDATE shop_order SET state = :state WHERE id = :id"), {"state": state, "id": order})
    else:
        connection.execute("UPDATE shop_order SET state = %s WHERE id = %s", [state, order])


def session(request: Request) -> Iterator[Session]:
    """A session in one transaction, which commits if the endpoint raises nothing."""
    with Session(request.app.state.engine) as session, session.begin():
        yield session


# scope="function": commit before the response goes out. By default what follows `yield` runs after it, and a caller
# would be told of an order whose COMMIT fails.
Database = Annotated[Session, Depends(session, scope="function")]


class Tracing:
    """Carry the caller's trace onto all that is sent for its request.

    It is ASGI middleware, since what a sync dependency sets in its context is lost: it runs in another one.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        trace = Headers(scope=scope).get("traceparent", "") if scope["type"] == "http" else ""
        if TRACEPARENT.fullmatch(trace):
            with carrying(traceparent=trace):
                await self._app(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def order(wanted: Reserve, database: Database) -> dict[str, object]:
    """Take an order, and ask the warehouse."""
    new = Order(state="new")
    database.add(new)
    database.flush()
    outbox.command(database, reserve, wanted, key=new.id, reply_to="shop")
    return {"id": new.id, "state": new.state}


def state(id: int, database: Database) -> dict[str, object]:
    """Tell how far an order is."""
    found = database.get(Order, id)
    if found is None:
        raise HTTPException(404, "There is no such order.")
    return {"id": found.id, "state": found.state}


def health(request: Request, response: Response) -> dict[str, object]:
    """Tell a probe whether the worker claims messages; of what is wrong, the class only."""
    worker: Worker = request.app.state.worker
    if worker.healthy:
        return {"worker": "ok"}
    response.status_code = 503
    return {"worker": "not started" if worker.failure is None else type(worker.failure).__name__}


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Run the worker beside the service; uvicorn ends this on SIGTERM, and then the worker's batches are finished."""
    with app.state.worker:
        yield


def create_app(dsn: str | None = None) -> FastAPI:
    """Return the service, on the database that is given or named by MAILROOM_DSN."""
    url = (dsn or os.environ["MAILROOM_DSN"]).replace("postgresql:", "postgresql+psycopg:")
    app = FastAPI(lifespan=lifespan)
    app.state.engine = create_engine(url)
    app.state.worker = Worker(app.state.engine, "shop", shop)
    app.add_middleware(Tracing)
    app.post("/orders", status_code=202)(order)
    app.get("/orders/{id}")(state)
    app.get("/health")(health)
    return app
