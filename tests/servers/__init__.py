"""The real servers that the tests run against.

A server is one class in a file of its own: a subclass of `server.Server` that
knows its package, how to start it from there, how to ask it whether it is
ready, and which variables tell the tests about it. `ALL` is the list that
`tests/services` works through; a new server joins it here and gets a service
of the same name in docker-compose.yml.
"""

from .kafka import Kafka
from .mariadb import Mariadb
from .mongodb import Mongodb
from .mysql import Mysql
from .postgres import Postgres
from .rabbitmq import Rabbitmq

ALL = [
    # These first: they take longest to start and need no one's attention
    # while the others are being prepared.
    Kafka(),
    Rabbitmq(),
    Postgres("postgres", "18.6", certificate="localhost"),
    Postgres("postgres-old", "14.24", certificate="server"),
    Mysql(),
    Mariadb(),
    Mongodb(),
]
