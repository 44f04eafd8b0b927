"""RabbitMQ, through aio-pika: exchanges that confirm what their queues have, and queues that forget what is taken."""
