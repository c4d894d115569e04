"""Apache Kafka: one node that is broker and controller at once.

`config/kafka.properties` is its whole configuration; ports and folders reach
it through the process environment.
"""

import struct
from pathlib import Path

from . import packages
from .process import Process, run, spawn
from .server import CONFIG, Place, Server, environment, exchange

VERSION = "4.3.1"
# The binding for the slf4j version that Kafka depends on; without one it logs nothing.
LOGGING = "org.slf4j:slf4j-simple:1.7.36"
CLUSTER = "outboxd-test-cluster-1"
# They start faster and leave more of a small machine to the tests.
JVM = ["-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]
USERS = {"admin": "admin-secret", "outboxd": "outboxd-secret", "restricted": "restricted-secret"}


class Kafka(Server):
    name = "kafka"
    title = f"Kafka {VERSION}"
    image = f"apache/kafka:{VERSION}"
    address_variable = "OUTBOXD_TEST_KAFKA"
    jvm = JVM
    port_variables = ("OUTBOXD_KAFKA_PORT", "OUTBOXD_KAFKA_SASL_SSL_PORT", "OUTBOXD_KAFKA_CONTROLLER_PORT")

    def fetch(self) -> None:
        self._libraries()

    def start(self, place: Place) -> Process:
        settings = environment(
            {
                "OUTBOXD_KAFKA_LISTEN": "127.0.0.1",
                "OUTBOXD_KAFKA_DATA": str(place.folder / "data"),
                "OUTBOXD_KAFKA_CERTS": str(place.certificates),
                **{name: str(port) for name, port in place.ports.items()},
            }
        )
        java = ["java", *self.jvm, "-Dorg.slf4j.simpleLogger.showDateTime=true", "-cp", f"{self._libraries()}/*"]
        properties = CONFIG / "kafka.properties"
        scram = [
            word
            for mechanism in ("SCRAM-SHA-256", "SCRAM-SHA-512")
            for user, password in USERS.items()
            for word in ("--add-scram", f"{mechanism}=[name={user},password={password}]")
        ]
        run(
            [*java, "kafka.tools.StorageTool", "format", f"--cluster-id={CLUSTER}", "-c", properties, *scram],
            log=place.log,
            env=settings,
        )
        return spawn([*java, "kafka.Kafka", properties], log=place.log, env=settings, cwd=place.folder)

    def address(self, ports: dict[str, int]) -> str:
        return f"127.0.0.1:{ports['OUTBOXD_KAFKA_PORT']}"

    def answers(self, address: str) -> bool:
        """Whether its metadata lists a broker. The listener accepts requests a
        moment earlier, but creating a topic would still fail then."""
        host, _, port = address.split(",")[0].rpartition(":")
        metadata, version, correlation, no_topics = 3, 1, 1, 0
        request = struct.pack(">hhihi", metadata, version, correlation, -1, no_topics)
        reply = exchange(host, int(port), struct.pack(">i", len(request)) + request, 12)
        # The reply begins with its length, the correlation id, and how many brokers follow.
        return len(reply) == 12 and struct.unpack(">iii", reply)[2] >= 1

    def exports(self, place: Place) -> dict[str, str]:
        return {"OUTBOXD_TEST_KAFKA_SASL_SSL": f"127.0.0.1:{place.ports['OUTBOXD_KAFKA_SASL_SSL_PORT']}"}

    def package_exports(self) -> dict[str, str]:
        return {"OUTBOXD_TEST_KAFKA_LIBS": str(self._libraries())}

    def _libraries(self) -> Path:
        return packages.cached(
            f"kafka-{VERSION}",
            lambda folder: packages.fetch_jars([f"org.apache.kafka:kafka_2.13:{VERSION}", LOGGING], folder),
        )
