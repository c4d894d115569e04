"""What the loads of all sources have in common: their options, the relay that they start, and the latency that they
take at the end."""

import argparse
from pathlib import Path

from servers.failure import Failure

from .report import Report, Row
from .stage import BenchKafka, Stage, say

PARTITIONS = 6


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--rows", type=int, default=1_000_000, help="rows of the backlog (%(default)s)")
    add("--rows-per-commit", type=int, default=100, help="rows in each transaction (%(default)s)")
    add("--payload", type=int, default=200, metavar="BYTES", help="size of each payload (%(default)s)")
    add("--runs", type=int, default=3, help="how often the backlog is drained by each (%(default)s)")
    add("--rate", type=int, default=1000, help="single-row commits a second; 0 leaves latency out (%(default)s)")
    add("--seconds", type=int, default=20, help="that the rate is held, after 5 s that do not count (%(default)s)")
    add("--outboxd", type=Path, metavar="PROGRAM", help="measure this program instead of building one")
    add("--kafka", action="append", default=[], metavar="KEY=VALUE", help="handed to outboxd")
    add("--keep-logs", type=Path, metavar="DIR", help="where outboxd's logs go")


class Load:
    """One source's bench. A subclass knows how rows are loaded, drained, and what outboxd is told of the source."""

    def __init__(self, stage: Stage, report: Report, options: argparse.Namespace, brokers: str, broker: int):
        self.stage, self.report, self.options = stage, report, options
        self.outboxd = options.outboxd.absolute() if options.outboxd else stage.outboxd
        self.brokers, self.broker = brokers, broker
        self.logs = (options.keep_logs or stage.folder).absolute()
        self.logs.mkdir(parents=True, exist_ok=True)

    # The address of the outbox, for outboxd and instruments alike.
    source: str

    def flags(self, name: str) -> list:
        """What tells outboxd which position is its own."""
        raise NotImplementedError

    def begin_latency(self, name: str) -> None:
        """Makes what a relay of this name needs to start at the log's end."""

    def tell_setting(self, source: str, **own) -> None:
        """What the figures hold for."""
        options = self.options
        self.report.add(
            "setting",
            source=source,
            sink=BenchKafka.title,
            partitions=PARTITIONS,
            rows=options.rows,
            rows_per_commit=options.rows_per_commit,
            payload_bytes=options.payload,
            **own,
            kafka_jvm=BenchKafka.jvm,
            outboxd_kafka=options.kafka,
            **self.report.machine(),
        )

    def warm_broker(self) -> None:
        """The first turn would pay for the compilation of the broker's code otherwise."""
        steady = ["--rate", 20_000, "--warm", 0, "--seconds", 5, "--payload", self.options.payload]
        self.stage.measure("latency", *self.relay("bench_warming"), *steady, "--direct")

    def measure_backlog(self, name: str, watched: list, flags: list) -> dict:
        """Times outboxd over the backlog; `watched` is what else the instrument looks at."""
        measured = self.stage.measure(
            "backlog",
            *self.relay(name),
            *["--rows", self.options.rows, "--broker", self.broker, *watched, "--ends"],
            *["--", *self.command(name), *flags, "--until-caught-up"],
        )
        if measured["exit"] != "exit status: 0":
            raise Failure(f"outboxd ended with {measured['exit']}")
        return measured

    def latency(self) -> list[dict]:
        options, name = self.options, "bench_latency"
        if not options.rate:
            return []
        say(f"latency at {options.rate:,} commits a second")
        steady = ["--rate", options.rate, "--seconds", options.seconds, "--payload", options.payload]
        direct = self.stage.measure("latency", *self.relay(f"{name}_control"), *steady, "--direct")
        self.report.add("latency control", **direct)
        self.begin_latency(name)
        relayed = self.stage.measure("latency", *self.relay(name), *steady, "--", *self.command(name))
        self.report.add("outboxd latency", **relayed)
        return [direct, relayed]

    def relay(self, name: str) -> list:
        """What every instrument that watches a relay wants to know."""
        return [
            *["--source", self.source, "--brokers", self.brokers],
            *["--topic", name, "--partitions", PARTITIONS, "--log", self.logs / f"{name}.log"],
        ]

    def command(self, name: str) -> list:
        command = [self.outboxd, "run", self.source, *self.flags(name)]
        command += ["--brokers", self.brokers, "--topic", name, "--admin", "off"]
        return command + [word for setting in self.options.kafka for word in ("--kafka", setting)]


def nothing_lost(measured: list[dict]) -> bool:
    lost = sum(line["missing"] + line.get("disordered", 0) for line in measured)
    if lost:
        say(f"{lost} records are missing or out of order")
    return not lost


def delivery_rows(of) -> list[Row]:
    """What every source's backlog is asked; `of` gives a figure of outboxd over all runs."""
    return [
        Row("broker CPU s/M", of("broker_cpu_s_per_m"), 2),
        Row("outboxd peak RSS, MiB", of("peak_rss_mib"), 1, at_most=100),
        Row("outboxd start to first record, s", of("first_s"), 2, at_most=1.2),
        Row("records missing", of("missing"), at_most=0),
        Row("records out of order", of("disordered"), at_most=0),
        Row("records repeated", of("duplicates")),
        Row("load average", of("load_average"), 1),
    ]


def latency_rows(latency: list[dict]) -> list[Row]:
    if not latency:
        return []
    control, relayed = latency
    rows = []
    for title, spans in (
        ("control, produce → consumer", control["from_send_ms"]),
        ("outboxd, INSERT sent → consumer", relayed["from_send_ms"]),
        ("outboxd, committed → consumer", relayed["from_commit_ms"]),
    ):
        rows += [Row(f"{title}, {name} ms", [spans[name]], 2) for name in ("p50", "p99", "max")]
    return rows
