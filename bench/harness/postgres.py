"""PostgreSQL's log to Kafka: a backlog drained, and the latency of single commits.

One backlog is loaded after the slot `bench` was made and is drained by turns

    by a bare client that reads eagerly and discards      the limit without a trick
    by a bare client that pauses before each read         the limit of reading in bursts
    by outboxd run --until-caught-up                      to a new topic of a real broker

each time from the same position: the bare clients confirm nothing, and outboxd gets copies of the slot. Then rows
are committed one by one at a steady rate with outboxd running, and the time until a consumer has them is taken; the
control is the same harness producing to Kafka without database and relay.
"""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

from . import REPOSITORY, load
from .load import Load, delivery_rows, latency_rows, nothing_lost
from .report import Report, Row
from .stage import BenchKafka, BenchPostgres, Stage, say

SUMMARY = "a backlog and single commits, PostgreSQL's log to Kafka"
SLOT, PUBLICATION = "bench", "outboxd"

NATIVE = REPOSITORY / "sql/postgres/native.sql"
# Without comments, for no argument may begin with dashes; with ids as `outboxd init` makes them on this server.
OUTBOX = "".join(line for line in NATIVE.open() if not line.lstrip().startswith("--"))
OUTBOX = OUTBOX.replace("gen_random_uuid()", "uuidv7()")
# Rows are numbered, so that what arrives can be checked; the rest of a payload is hex digits, so that compressing
# it takes work and gains a half.
LOAD = """
CREATE PROCEDURE load_outbox(total bigint, rows_per_commit bigint, payload_bytes bigint) LANGUAGE plpgsql AS $$
DECLARE
    done bigint := 0;
    digests bigint := payload_bytes / 32 + 1;
BEGIN
    WHILE done < total LOOP
        INSERT INTO outbox (partition_key, event_type, payload)
        SELECT n % 10000, 'OrderCreated',
               jsonb_build_object('n', n, 'note', left(
                   (SELECT string_agg(md5((n * digests + part)::text), '') FROM generate_series(1, digests) part),
                   greatest(payload_bytes - 18 - length(n::text), 0)::int))
        FROM generate_series(done + 1, least(done + rows_per_commit, total)) n;
        COMMIT;
        done := done + rows_per_commit;
    END LOOP;
END $$
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    load.add_options(parser)
    parser.add_argument(
        "--pause", type=int, default=200, metavar="MICROS", help="of the bare client that does (%(default)s)"
    )


def run(stage: Stage, report: Report, options: argparse.Namespace) -> bool:
    stage.build()
    bench = PostgresLoad.begin(stage, report, options)
    drained = [bench.drain_by_turns(turn) for turn in range(1, options.runs + 1)]
    latency = bench.latency()
    report.table(_table(options, drained) + latency_rows(latency))
    return nothing_lost([outboxd for _, _, outboxd in drained] + latency)


class PostgresLoad(Load):
    @classmethod
    def begin(cls, stage: Stage, report: Report, options: argparse.Namespace) -> Self:
        """With its servers, and the backlog in place."""
        brokers, broker = stage.start(BenchKafka())
        address, _ = stage.start(BenchPostgres())
        bench = cls(stage, report, options, brokers, broker.pid)
        # Bare client and outboxd alike; TLS would be measured otherwise.
        bench.source = f"{address}?sslmode=disable"
        version = bench.sql("SHOW server_version")[0][0]
        bench.tell_setting("PostgreSQL " + version, postgres={"fsync": "off", **BenchPostgres.settings})
        bench.load()
        bench.warm_broker()
        return bench

    def sql(self, *statements: str) -> list[list[str]]:
        return self.stage.measure("sql", self.source, *statements)

    def flags(self, name: str) -> list:
        return ["--slot", name, "--publication", PUBLICATION]

    def relay(self, name: str) -> list:
        return [*super().relay(name), "--slot", name]

    def begin_latency(self, name: str) -> None:
        self.sql(f"SELECT pg_create_logical_replication_slot('{name}', 'pgoutput')")

    def load(self) -> None:
        options = self.options
        say(f"loading {options.rows:,} rows in transactions of {options.rows_per_commit:,}")
        self.sql(
            OUTBOX,
            f"CREATE PUBLICATION {PUBLICATION} FOR TABLE outbox WITH (publish = 'insert')",
            f"SELECT pg_create_logical_replication_slot('{SLOT}', 'pgoutput')",
            LOAD,
        )
        before, after = (
            self.sql(*statements)[0]
            for statements in (
                ["SELECT extract(epoch FROM clock_timestamp()), pg_current_wal_lsn() - '0/0'::pg_lsn"],
                [
                    "SET synchronous_commit = off",
                    f"CALL load_outbox({options.rows}, {options.rows_per_commit}, {options.payload})",
                    "CHECKPOINT",
                    "SELECT extract(epoch FROM clock_timestamp()), pg_current_wal_lsn() - '0/0'::pg_lsn",
                ],
            )
        )
        (size,) = self.sql("SELECT avg(length(payload::text)) FROM (SELECT payload FROM outbox LIMIT 1000) sample")[0]
        self.report.add(
            "load",
            rows=options.rows,
            seconds=float(after[0]) - float(before[0]),
            wal_bytes=int(after[1]) - int(before[1]),
            payload_bytes=float(size),
        )

    def drain_by_turns(self, turn: int) -> tuple[dict, dict, dict]:
        say(f"run {turn} of {self.options.runs}")
        eager = self.report.add("bare eager", run=turn, **self.bare(0))
        paced = self.report.add("bare paced", run=turn, **self.bare(self.options.pause))
        relayed = self.backlog(f"bench_{turn}")
        relayed["of_eager"] = relayed["rows_s"] / eager["rows_s"]
        relayed["of_paced"] = relayed["rows_s"] / paced["rows_s"]
        self.report.add("outboxd backlog", run=turn, **relayed)
        return eager, paced, relayed

    def bare(self, pause: int) -> dict:
        arguments = ["--slot", SLOT, "--publication", PUBLICATION, "--rows", self.options.rows, "--pause", pause]
        return self.stage.measure("drain", self.source, *arguments)

    @contextmanager
    def slot(self, name: str) -> Iterator[None]:
        """A copy of the slot before the backlog, for one relay to read."""
        self.sql(f"SELECT pg_copy_logical_replication_slot('{SLOT}', '{name}')")
        yield
        self.sql(f"SELECT pg_drop_replication_slot('{name}')")

    def backlog(self, name: str) -> dict:
        with self.slot(name):
            return self.measure_backlog(name, watched=[], flags=[])


def _table(options: argparse.Namespace, drained: list[tuple[dict, dict, dict]]) -> list[Row]:
    def of(which: int, name: str) -> list[float | None]:
        return [turn[which][name] for turn in drained]

    eager, paced, outboxd = 0, 1, 2
    return [
        Row("outboxd rows/s, first to last", of(outboxd, "rows_s")),
        Row("outboxd rows/s, start included", of(outboxd, "wall_rows_s")),
        Row("bare eager rows/s", of(eager, "rows_s")),
        Row(f"bare {options.pause} µs rows/s", of(paced, "rows_s")),
        Row("outboxd / bare eager", of(outboxd, "of_eager"), 2, at_least=0.9),
        Row(f"outboxd / bare {options.pause} µs", of(outboxd, "of_paced"), 2),
        Row("outboxd CPU s/M", of(outboxd, "cpu_s_per_m"), 2, at_most=5),
        Row("bare eager CPU s/M", of(eager, "cpu_s_per_m"), 2),
        Row(f"bare {options.pause} µs CPU s/M", of(paced, "cpu_s_per_m"), 2),
        Row("walsender CPU s/M, outboxd", of(outboxd, "walsender_cpu_s_per_m"), 2),
        Row("walsender CPU s/M, bare eager", of(eager, "walsender_cpu_s_per_m"), 2),
        Row(f"walsender CPU s/M, bare {options.pause} µs", of(paced, "walsender_cpu_s_per_m"), 2),
        *delivery_rows(lambda name: of(outboxd, name)),
    ]
