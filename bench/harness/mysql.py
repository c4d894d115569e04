"""MySQL's binary log to Kafka: a backlog drained, and the latency of single commits.

One backlog is loaded and is drained by turns

    by a bare client that reads and discards              the limit that the server sets
    by a bare client that decodes every row to text       what reading rows costs
    by outboxd run --until-caught-up                      to a new topic of a real broker

each time from the same position. Then rows are committed one by one at a steady rate with outboxd running, and the
time until a consumer has them is taken; the control is the same harness producing to Kafka without database and relay.
"""

import argparse
from pathlib import Path

from servers.failure import Failure
from servers.mysql import Mysql

from .report import Report, Row
from .stage import BenchKafka, Stage, say

SUMMARY = "a backlog and single commits, MySQL's binary log to Kafka"
PARTITIONS = 6
DATABASE = "bench"

# Rows are numbered, so that what arrives can be checked; the rest of a payload is hex digits, so that compressing
# it takes work and gains a half.
LOAD = """
CREATE PROCEDURE load_outbox(total BIGINT, rows_per_commit BIGINT, payload_bytes BIGINT)
BEGIN
    DECLARE done BIGINT DEFAULT 0;
    WHILE done < total DO
        INSERT INTO outbox (partition_key, event_type, payload)
        SELECT MOD(n, 10000), 'OrderCreated',
               JSON_OBJECT('n', n, 'note', LEFT(CONCAT(SHA2(n, 512), SHA2(-n, 512), REPEAT(SHA2(n + 1, 512), payload_bytes DIV 128)),
                                                GREATEST(payload_bytes - 18 - LENGTH(n), 0)))
        FROM (SELECT done + number AS n FROM numbers WHERE number <= LEAST(rows_per_commit, total - done)) AS numbered
        ORDER BY n;
        SET done = done + rows_per_commit;
    END WHILE;
END
"""


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


def run(stage: Stage, report: Report, options: argparse.Namespace) -> bool:
    outboxd = stage.build()
    if options.outboxd:
        outboxd = options.outboxd.absolute()
    brokers, broker = stage.start(BenchKafka())
    address, server = stage.start(Mysql())
    bench = Bench(stage, report, options, outboxd, address, brokers, broker.pid, server.pid)
    report.add(
        "setting",
        source="MySQL " + bench.sql("SELECT VERSION()")[0][0],
        sink=BenchKafka.title,
        partitions=PARTITIONS,
        rows=options.rows,
        rows_per_commit=options.rows_per_commit,
        payload_bytes=options.payload,
        kafka_jvm=BenchKafka.jvm,
        outboxd_kafka=options.kafka,
        **report.machine(),
    )
    bench.load()
    bench.warm_broker()
    drained = [bench.drain_by_turns(turn) for turn in range(1, options.runs + 1)]
    latency = bench.latency() if options.rate else []
    report.table(_table(drained, latency))
    measured = [outboxd for _, _, outboxd in drained] + latency
    lost = sum(line["missing"] + line.get("disordered", 0) for line in measured)
    if lost:
        say(f"{lost} records are missing or out of order")
    return not lost


class Bench:
    def __init__(self, stage, report, options, outboxd: Path, address: str, brokers: str, broker: int, server: int):
        self.stage, self.report, self.options = stage, report, options
        self.outboxd, self.brokers, self.broker, self.server = outboxd, brokers, broker, server
        # Bare client and outboxd alike; TLS would be measured otherwise.
        self.address = f"{address}?ssl-mode=disabled"
        self.source = f"{address}{DATABASE}?ssl-mode=disabled"
        self.logs = (options.keep_logs or stage.folder).absolute()
        self.logs.mkdir(parents=True, exist_ok=True)
        self.begin = self.end = ""

    def sql(self, *statements: str, source: str | None = None) -> list[list[str]]:
        return self.stage.measure("sql", source or self.address, *statements)

    def here(self) -> tuple[str, str]:
        (file, offset, _, _, gtids), *_ = self.sql("SHOW BINARY LOG STATUS")
        return gtids.replace("\n", ""), f"{file}:{offset}"

    def load(self) -> None:
        options = self.options
        say(f"loading {options.rows:,} rows in transactions of {options.rows_per_commit:,}")
        self.sql(f"CREATE DATABASE {DATABASE}")
        self.stage.run(self.outboxd, "init", self.source, "--name", "made_by_init")
        batch = options.rows_per_commit
        self.sql(
            "CREATE TABLE numbers (number BIGINT PRIMARY KEY)",
            f"SET SESSION cte_max_recursion_depth = {batch + 1}",
            f"INSERT INTO numbers WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {batch})"
            " SELECT i FROM n",
            LOAD,
            source=self.source,
        )
        self.begin, _ = self.here()
        clock = "SELECT UNIX_TIMESTAMP(NOW(6))"
        call = f"CALL load_outbox({options.rows}, {batch}, {options.payload})"
        before = self.sql(clock)[0][0]
        after = self.sql(call, "SELECT UNIX_TIMESTAMP(SYSDATE(6))", source=self.source)[0][0]
        _, self.end = self.here()
        (size,) = self.sql("SELECT AVG(LENGTH(payload)) FROM (SELECT payload FROM outbox LIMIT 1000) sample",
                           source=self.source)[0]
        self.report.add(
            "load", rows=options.rows, seconds=float(after) - float(before), payload_bytes=float(size), end=self.end
        )

    def warm_broker(self) -> None:
        """The first turn would pay for the compilation of the broker's code otherwise."""
        steady = ["--rate", 20_000, "--warm", 0, "--seconds", 5, "--payload", self.options.payload]
        self.stage.measure("latency", *self.relay("bench_warming"), *steady, "--direct")

    def drain_by_turns(self, turn: int) -> tuple[dict, dict, dict]:
        say(f"run {turn} of {self.options.runs}")
        bare = self.report.add("bare", run=turn, **self.bare())
        decoding = self.report.add("bare decoding", run=turn, **self.bare("--decode"))
        relayed = self.backlog(f"bench_{turn}")
        relayed["of_decoding"] = relayed["rows_s"] / decoding["rows_s"]
        relayed["of_bare"] = relayed["rows_s"] / bare["rows_s"]
        self.report.add("outboxd backlog", run=turn, **relayed)
        return bare, decoding, relayed

    def bare(self, *more: str) -> dict:
        arguments = ["--from", self.begin, "--until", self.end, "--rows", self.options.rows, "--server", self.server]
        return self.stage.measure("binlog", self.address, *arguments, *more)

    def backlog(self, name: str) -> dict:
        measured = self.stage.measure(
            "backlog",
            *self.relay(name),
            *["--rows", self.options.rows, "--broker", self.broker, "--server", self.server, "--ends"],
            *["--", *self.command(name), "--start", self.begin, "--until-caught-up"],
        )
        if measured["exit"] != "exit status: 0":
            raise Failure(f"outboxd ended with {measured['exit']}")
        return measured

    def latency(self) -> list[dict]:
        options, name = self.options, "bench_latency"
        say(f"latency at {options.rate:,} commits a second")
        steady = ["--rate", options.rate, "--seconds", options.seconds, "--payload", options.payload]
        direct = self.stage.measure("latency", *self.relay(f"{name}_control"), *steady, "--direct")
        self.report.add("latency control", **direct)
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
        command = [self.outboxd, "run", self.source, "--name", name]
        command += ["--brokers", self.brokers, "--topic", name, "--admin", "off"]
        return command + [word for setting in self.options.kafka for word in ("--kafka", setting)]


def _table(drained: list, latency: list[dict]) -> list[Row]:
    def of(which: int, name: str) -> list:
        return [turn[which].get(name) for turn in drained]

    bare, decoding, outboxd = 0, 1, 2
    rows = [
        Row("outboxd rows/s, first to last", of(outboxd, "rows_s")),
        Row("outboxd rows/s, start included", of(outboxd, "wall_rows_s")),
        Row("bare rows/s", of(bare, "rows_s")),
        Row("bare, decoding every row, rows/s", of(decoding, "rows_s")),
        Row("outboxd / bare decoding", of(outboxd, "of_decoding"), 2, at_least=0.8),
        Row("outboxd / bare", of(outboxd, "of_bare"), 2),
        Row("outboxd CPU s/M", of(outboxd, "cpu_s_per_m"), 2, at_most=8),
        Row("bare decoding CPU s/M", of(decoding, "cpu_s_per_m"), 2),
        Row("server CPU s/M, outboxd", of(outboxd, "server_cpu_s_per_m"), 2),
        Row("broker CPU s/M", of(outboxd, "broker_cpu_s_per_m"), 2),
        Row("outboxd peak RSS, MiB", of(outboxd, "peak_rss_mib"), 1, at_most=100),
        Row("outboxd start to first record, s", of(outboxd, "first_s"), 2, at_most=1.2),
        Row("records missing", of(outboxd, "missing"), at_most=0),
        Row("records out of order", of(outboxd, "disordered"), at_most=0),
        Row("records repeated", of(outboxd, "duplicates")),
        Row("load average", of(outboxd, "load_average"), 1),
    ]
    if latency:
        control, relayed = latency
        for title, spans in (
            ("control, produce → consumer", control["from_send_ms"]),
            ("outboxd, INSERT sent → consumer", relayed["from_send_ms"]),
            ("outboxd, committed → consumer", relayed["from_commit_ms"]),
        ):
            rows += [Row(f"{title}, {name} ms", [spans[name]], 2) for name in ("p50", "p99", "max")]
    return rows
