"""PostgreSQL's log to HTTP, to RabbitMQ, and to several publishers at once.

One backlog is loaded and is drained by turns

    by outboxd to an HTTP server              batches of 100, 10 lanes; one that answers at once, and one that takes 10 ms
    by outboxd to RabbitMQ                    with confirms
    by outboxd to 1, 2, 5 and 20 publishers   each a topic of its own in Kafka

each time from the same position. Beside each of the first two a bare client of the same library sends the same bodies to
the same server in the same batches and lanes: what sending costs at the least. It has the bodies in memory, while outboxd
reads them from the log: where sending is faster than the log, the log is the limit. How fast the log can be read at all is
measured beside them, by a client that reads and discards it. The receiver takes every event apart and counts what is missing
and what is out of order.
"""

import argparse
import json

from servers.rabbitmq import Rabbitmq

from . import postgres
from .load import PARTITIONS
from .postgres import PUBLICATION, PostgresLoad
from .report import Report, Row
from .stage import Stage, say

SUMMARY = "a backlog to HTTP, to RabbitMQ, and to many publishers"
FANS = (1, 2, 5, 20)
LANES = 10
SERVICE_MS = 10
BATCH = {"http": 100, "http 10 ms": 100, "rabbitmq": 500}
TITLES = {"http": "HTTP", "http 10 ms": f"HTTP that takes {SERVICE_MS} ms", "rabbitmq": "RabbitMQ"}


def add_options(parser: argparse.ArgumentParser) -> None:
    postgres.add_options(parser)
    parser.set_defaults(rows=200_000, rate=0)


def run(stage: Stage, report: Report, options: argparse.Namespace) -> bool:
    stage.build()
    rabbitmq, _ = stage.start(Rabbitmq())
    bench = SinksLoad.begin(stage, report, options)
    turns = [bench.turn(turn, rabbitmq) for turn in range(1, options.runs + 1)]
    report.table(_table(turns))
    lost = sum(line.get("missing", 0) for turn in turns for line in turn.values())
    if lost:
        say(f"{lost} events are missing")
    return not lost


class SinksLoad(PostgresLoad):
    def turn(self, turn: int, rabbitmq: str) -> dict:
        say(f"run {turn} of {self.options.runs}")
        measured = {"log": self.report.add("bare reader of the log", run=turn, **self.bare(self.options.pause))}
        servers = {"http": [], "http 10 ms": ["--service", SERVICE_MS], "rabbitmq": ["--rabbitmq", rabbitmq]}
        for kind, server in servers.items():
            bare = self.bare_sender(kind, server)
            self.report.add(f"bare {kind}", run=turn, **bare)
            relayed = self.to_sink(kind, server, f"bench_{kind.replace(' ', '_')}_{turn}")
            relayed["of_bare"] = relayed["rows_s"] / bare["rows_s"]
            relayed["of_lesser"] = relayed["rows_s"] / min(bare["rows_s"], measured["log"]["rows_s"])
            self.report.add(f"outboxd to {kind}", run=turn, **relayed)
            measured[f"bare {kind}"], measured[kind] = bare, relayed
        for count in FANS:
            fanned = self.to_publishers(count, f"bench_fan{count}_{turn}")
            measured[count] = self.report.add(f"outboxd to {count} publishers", run=turn, **fanned)
        return measured

    def receive(self, server: list, name: str, command: list) -> dict:
        return self.stage.measure(
            "receive", *server, "--rows", self.options.rows, "--log", self.logs / f"{name}.log", "--", *command
        )

    def bare_sender(self, kind: str, server: list) -> dict:
        options = self.options
        command = [self.stage.instruments, "send", "SINK", "--rows", options.rows, "--payload", options.payload]
        return self.receive(server, f"bare_{kind.replace(' ', '_')}", [*command, "--batch", BATCH[kind], "--lanes", LANES])

    def to_sink(self, kind: str, server: list, name: str) -> dict:
        command = [self.outboxd, "run", self.source, *self.flags(name), "--sink", "SINK", "--admin", "off"]
        command += ["--lanes", LANES, "--until-caught-up"]
        if kind == "rabbitmq":
            command += ["--amqp-batch", BATCH[kind], "--routing-key", "bench"]
        else:
            command += ["--http-batch", BATCH[kind]]
        with self.slot(name):
            return self.receive(server, name, command)

    def to_publishers(self, count: int, name: str) -> dict:
        """All but the first write to topics that are made before; the first's is what the instrument watches."""
        lines = [
            "[pipeline.bench]",
            f"source = {json.dumps(self.source)}",
            f"slot = {json.dumps(name)}",
            f"publication = {json.dumps(PUBLICATION)}",
            f"brokers = {json.dumps(self.brokers)}",
            f'create-topics = "{PARTITIONS}"',
        ]
        for at in range(count):
            topic = name if at == 0 else f"{name}_{at}"
            lines += [f"[pipeline.bench.publisher.p{at}]", f"topic = {json.dumps(topic)}"]
        config = self.stage.folder / f"{name}.toml"
        config.write_text("\n".join(lines) + "\n")
        with self.slot(name):
            measured = self.stage.measure(
                "backlog",
                *self.relay(name),
                *["--rows", self.options.rows, "--broker", self.broker, "--ends"],
                *["--", self.outboxd, "run", "--config", config, "--admin", "off", "--until-caught-up"],
            )
        # By its end, not by the first topic's: all of them are to be full.
        measured["deliveries_s"] = count * self.options.rows / measured["exit_s"]
        measured["cpu_s_per_m_deliveries"] = measured["cpu_s_per_m"] / count
        self.sql("DELETE FROM outboxd_checkpoint", "DELETE FROM outboxd_publishers")
        return measured


def _table(turns: list[dict]) -> list[Row]:
    def of(which, name: str) -> list[float | None]:
        return [turn[which].get(name) for turn in turns]

    rows = [Row("bare reader of the log, rows/s", of("log", "rows_s"))]
    for kind, title in TITLES.items():
        rows += [
            Row(f"outboxd to {title}, events/s", of(kind, "rows_s")),
            Row(f"bare client to {title}, events/s", of(f"bare {kind}", "rows_s")),
            Row(f"outboxd / bare, {title}", of(kind, "of_bare"), 2, at_least=0.7),
            Row(f"outboxd / the lesser of bare client and bare reader of the log, {title}", of(kind, "of_lesser"), 2),
            Row(f"outboxd to {title} / outboxd to Kafka", [
                turn[kind]["rows_s"] / turn[1]["rows_s"] for turn in turns
            ], 2),
            Row(f"outboxd to {title}, CPU s/M", of(kind, "cpu_s_per_m"), 2),
            Row(f"bare client to {title}, CPU s/M", of(f"bare {kind}", "cpu_s_per_m"), 2),
            Row(f"outboxd to {title}, peak RSS, MiB", of(kind, "peak_rss_mib"), 1),
            Row(f"events missing, {title}", of(kind, "missing"), at_most=0),
        ]
    for count in FANS:
        rows += [
            Row(f"{count} publishers: deliveries/s", of(count, "deliveries_s")),
            Row(f"{count} publishers: outboxd CPU s/M deliveries", of(count, "cpu_s_per_m_deliveries"), 2),
            Row(f"{count} publishers: walsender CPU s/M rows", of(count, "walsender_cpu_s_per_m"), 2),
            Row(f"{count} publishers: peak RSS, MiB", of(count, "peak_rss_mib"), 1),
            Row(f"{count} publishers: records missing", of(count, "missing"), at_most=0),
        ]
    return rows
