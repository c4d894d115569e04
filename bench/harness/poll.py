"""Polled tables to Kafka: a backlog of pending rows drained, on each database; and an event store with many publishers.

On each database the layout `native` with its status columns is loaded with pending rows and drained by turns

    by a bare loop that claims a batch and marks it       outboxd's statements, on one connection, and nothing delivered
    by outboxd run --capture poll --until-caught-up       to a new topic of a real broker

each time from a table that was made and loaded anew. The servers say how many statements that took. Then an event store is
polled by position for 200 publishers, of which each event matches one.
"""

import argparse
import json

from servers.mongodb import Mongodb
from servers.mysql import Mysql

from . import load
from .load import PARTITIONS, Load
from .mysql import LOAD as MYSQL_LOAD
from .postgres import LOAD as POSTGRES_LOAD
from .report import Report, Row
from .stage import BenchKafka, BenchPostgres, Stage, say

SUMMARY = "pending rows of polled tables, and an event store with many publishers, to Kafka"
DATABASE = "bench"


def add_options(parser: argparse.ArgumentParser) -> None:
    load.add_options(parser)
    parser.add_argument("--on", choices=["postgres", "mysql", "mongodb", "event-store"], action="append", default=[],
                        help="only this one; repeatable (all)")
    parser.add_argument("--pairs", type=int, default=200, help="publishers of the event store (%(default)s)")
    parser.add_argument("--events", type=int, default=200_000, help="of the event store (%(default)s)")
    parser.set_defaults(runs=1, rate=0, rows_per_commit=1000)


def run(stage: Stage, report: Report, options: argparse.Namespace) -> bool:
    stage.build()
    brokers, broker = stage.start(BenchKafka())
    chosen = options.on or ["postgres", "mysql", "mongodb", "event-store"]
    postgres = stage.start(BenchVacuumed()) if {"postgres", "event-store"} & set(chosen) else None
    rows: list[Row] = []
    lost = 0
    warm = True
    for name in chosen:
        bench = BENCHES[name](stage, report, options, brokers, broker.pid)
        server = postgres if name in ("postgres", "event-store") else stage.start(Mysql() if name == "mysql" else Mongodb())
        bench.at(*server)
        bench.tell_setting(bench.title())
        if warm:
            bench.warm_broker()
            warm = False
        turns = [bench.turn(turn) for turn in range(1, options.runs + 1)]
        rows += bench.table(turns)
        lost += sum(line.get("missing", 0) + line.get("disordered", 0) for turn in turns for line in turn.values())
    report.table(rows)
    if lost:
        say(f"{lost} records are missing or out of order")
    return not lost


class BenchVacuumed(BenchPostgres):
    # Rows are updated twice: a table that is never vacuumed is none that people have.
    settings = {**BenchPostgres.settings, "autovacuum": "on", "autovacuum_naptime": "10s"}


class PollLoad(Load):
    name: str

    def at(self, address: str, process) -> None:
        raise NotImplementedError

    def title(self) -> str:
        raise NotImplementedError

    def load(self) -> None:
        """Makes the table anew, full of pending rows."""
        raise NotImplementedError

    def statements(self) -> int:
        """How many the server has counted so far."""
        raise NotImplementedError

    def flags(self, name: str) -> list:
        return ["--capture", "poll", "--layout", "native"]

    def init(self) -> None:
        self.stage.run(self.outboxd, "init", self.source, "--capture", "poll", "--layout", "native")

    def turn(self, turn: int) -> dict:
        rows = self.options.rows
        say(f"{self.name}: run {turn} of {self.options.runs}, loading {rows:,} rows twice")
        self.load()
        bare = self.stage.measure("claim", self.source, "--layout", "native", "--rows", rows, "--server", self.server)
        self.report.add(f"bare loop, {self.name}", run=turn, **bare)
        self.load()
        before = self.statements()
        relayed = self.measure_backlog(f"poll_{self.name}_{turn}", watched=["--server", self.server], flags=[])
        relayed["statements_per_1000"] = (self.statements() - before) * 1000 / rows
        relayed["of_bare"] = relayed["rows_s"] / bare["rows_s"]
        self.report.add(f"outboxd polling {self.name}", run=turn, **relayed)
        return {"bare": bare, "outboxd": relayed}

    def table(self, turns: list[dict]) -> list[Row]:
        def of(which: str, name: str) -> list[float | None]:
            return [turn[which].get(name) for turn in turns]

        name = self.name
        return [
            Row(f"{name}: outboxd rows/s", of("outboxd", "rows_s")),
            Row(f"{name}: bare loop rows/s", of("bare", "rows_s")),
            Row(f"{name}: outboxd / bare loop", of("outboxd", "of_bare"), 2, at_least=0.7),
            Row(f"{name}: statements per 1,000 rows", of("outboxd", "statements_per_1000"), 1),
            Row(f"{name}: outboxd CPU s/M", of("outboxd", "cpu_s_per_m"), 2),
            Row(f"{name}: outboxd peak RSS, MiB", of("outboxd", "peak_rss_mib"), 1, at_most=100),
            Row(f"{name}: records missing", of("outboxd", "missing"), at_most=0),
            Row(f"{name}: records out of order", of("outboxd", "disordered"), at_most=0),
            Row(f"{name}: records repeated", of("outboxd", "duplicates")),
        ]


class PostgresPoll(PollLoad):
    name = "postgres"

    def at(self, address: str, process) -> None:
        self.source, self.server = f"{address}?sslmode=disable", process.pid

    def title(self) -> str:
        return "PostgreSQL " + self.sql("SHOW server_version")[0][0]

    def sql(self, *statements: str) -> list[list[str]]:
        return self.stage.measure("sql", self.source, *statements)

    def load(self) -> None:
        options = self.options
        self.sql("DROP TABLE IF EXISTS outbox", "DROP PROCEDURE IF EXISTS load_outbox")
        self.init()
        call = f"CALL load_outbox({options.rows}, {options.rows_per_commit}, {options.payload})"
        self.sql(POSTGRES_LOAD, "SET synchronous_commit = off", call, "VACUUM ANALYZE outbox", "CHECKPOINT", "SELECT 1")

    def statements(self) -> int:
        # Every statement is a transaction of its own here.
        self.sql("SELECT pg_stat_force_next_flush()", "SELECT pg_sleep(1.1)", "SELECT 1")
        return int(self.sql("SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()")[0][0])


class MysqlPoll(PollLoad):
    name = "mysql"

    def at(self, address: str, process) -> None:
        self.address, self.server = f"{address}?ssl-mode=disabled", process.pid
        self.source = f"{address}{DATABASE}?ssl-mode=disabled"
        self.sql(f"CREATE DATABASE {DATABASE}", source=self.address)

    def title(self) -> str:
        return "MySQL " + self.sql("SELECT VERSION()")[0][0]

    def sql(self, *statements: str, source: str | None = None) -> list[list[str]]:
        return self.stage.measure("sql", source or self.source, *statements)

    def load(self) -> None:
        options, batch = self.options, self.options.rows_per_commit
        self.sql("DROP TABLE IF EXISTS outbox", "DROP TABLE IF EXISTS numbers", "DROP PROCEDURE IF EXISTS load_outbox")
        self.init()
        self.sql(
            "CREATE TABLE numbers (number BIGINT PRIMARY KEY)",
            f"SET SESSION cte_max_recursion_depth = {batch + 1}",
            f"INSERT INTO numbers WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {batch})"
            " SELECT i FROM n",
            MYSQL_LOAD,
            f"CALL load_outbox({options.rows}, {batch}, {options.payload})",
            "SELECT 1",
        )

    def statements(self) -> int:
        return int(self.sql("SHOW GLOBAL STATUS LIKE 'Questions'")[0][1])


class MongodbPoll(PollLoad):
    name = "mongodb"

    def at(self, address: str, process) -> None:
        self.address, self.server = address, process.pid
        self.turns = 0

    def title(self) -> str:
        return Mongodb.title

    def load(self) -> None:
        options = self.options
        # A database of its own each time.
        self.turns += 1
        self.source = self.address.replace("/?", f"/{DATABASE}{self.turns}?")
        self.init()
        shape = ["--rows", options.rows, "--rows-per-commit", options.rows_per_commit, "--payload", options.payload]
        self.stage.measure("documents", self.source, *shape, "--pending")

    def statements(self) -> int:
        return 0

    def table(self, turns: list[dict]) -> list[Row]:
        # What the relay itself asks: a find and an update for a claim, an update for the marks.
        for turn in turns:
            turn["outboxd"]["statements_per_1000"] = None
        return super().table(turns)


class EventStorePoll(PollLoad):
    name = "event-store"

    def at(self, address: str, process) -> None:
        self.source, self.server = f"{address}?sslmode=disable", process.pid

    def title(self) -> str:
        return "PostgreSQL " + self.sql("SHOW server_version")[0][0]

    def sql(self, *statements: str) -> list[list[str]]:
        return self.stage.measure("sql", self.source, *statements)

    def turn(self, turn: int) -> dict:
        options = self.options
        say(f"{self.name}: run {turn} of {options.runs}, {options.events:,} events for {options.pairs} publishers")
        self.sql("DROP TABLE IF EXISTS events", "DROP TABLE IF EXISTS outbox_topic_progress")
        self.stage.run(self.outboxd, "init", self.source, "--capture", "poll", "--layout", "event-store")
        self.sql(
            f"""INSERT INTO events (type, tags, data)
                SELECT 'OrderPlaced', ARRAY['pair=' || n % {options.pairs}, 'region=eu'],
                       jsonb_build_object('n', n, 'note', left(repeat(md5(n::text), 8), {options.payload} - 30))
                FROM generate_series(1, {options.events}) n""",
            "VACUUM ANALYZE events",
            "SELECT 1",
        )
        name = f"poll_pairs_{turn}"
        lines = ["[pipeline.bench]", f"source = {json.dumps(self.source)}", 'layout = "event-store"', 'capture = "poll"',
                 f"brokers = {json.dumps(self.brokers)}", f"topic = {json.dumps(name)}", f'create-topics = "{PARTITIONS}"',
                 "until-caught-up = true"]
        for pair in range(options.pairs):
            lines += [f"[pipeline.bench.publisher.p{pair}]", f'required-tags = ["pair={pair}"]']
        config = self.stage.folder / f"{name}.toml"
        config.write_text("\n".join(lines) + "\n")
        measured = self.stage.measure(
            "backlog", *self.relay(name), *["--rows", options.events, "--broker", self.broker, "--server", self.server],
            *["--ends", "--", self.outboxd, "run", "--config", config, "--admin", "off"],
        )
        self.report.add("event store", run=turn, pairs=options.pairs, **measured)
        return {"pairs": measured}

    def table(self, turns: list[dict]) -> list[Row]:
        def of(name: str) -> list[float | None]:
            return [turn["pairs"].get(name) for turn in turns]

        return [
            Row(f"event store, {self.options.pairs} pairs: deliveries/s", of("rows_s"), at_least=10_000),
            Row("event store: start to end, deliveries/s", of("wall_rows_s")),
            Row("event store: CPU s/M", of("cpu_s_per_m"), 2),
            Row("event store: peak RSS, MiB", of("peak_rss_mib"), 1),
            Row("event store: records missing", of("missing"), at_most=0),
            Row("event store: records out of order", of("disordered"), at_most=0),
        ]


BENCHES = {"postgres": PostgresPoll, "mysql": MysqlPoll, "mongodb": MongodbPoll, "event-store": EventStorePoll}
