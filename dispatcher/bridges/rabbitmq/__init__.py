"""RabbitMQ, through aio-pika: exchanges that confirm what their queues have, and queues that forget what is taken."""

from dispatcher.bridges.rabbitmq.publisher import RabbitPublisher as RabbitPublisher
from dispatcher.bridges.rabbitmq.source import RabbitSource as RabbitSource
