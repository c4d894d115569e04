"""MySQL's binary log to Kafka: a backlog drained, and the latency of single commits.

One backlog is loaded and is drained by turns

    by a bare client that reads and discards              the limit that the server sets
    by a bare client that decodes every row to text       what reading rows costs at the least
    by go-mysql, decoding every row                       what it costs an ordinary client, where Go is installed
    by outboxd run --until-caught-up                      to a new topic of a real broker

each time from the same position. Then rows are committed one by one at a steady rate with outboxd running, and the
time until a consumer has them is taken; the control is the same harness producing to Kafka without database and relay.
"""

import argparse
import urllib.parse
from pathlib import Path

from servers.mysql import Mysql

from . import load
from .load import Load, delivery_rows, latency_rows, nothing_lost
from .report import Report, Row
from .stage import BenchKafka, Stage, say

SUMMARY = "a backlog and single commits, MySQL's binary log to Kafka"
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


add_options = load.add_options


def run(stage: Stage, report: Report, options: argparse.Namespace) -> bool:
    stage.build()
    gomysql = stage.build_peer("gomysql")
    brokers, broker = stage.start(BenchKafka())
    address, server = stage.start(Mysql())
    bench = MysqlLoad(stage, report, options, brokers, broker.pid)
    bench.at(address, server.pid, gomysql)
    bench.tell_setting("MySQL " + bench.sql("SELECT VERSION()")[0][0])
    bench.load()
    bench.warm_broker()
    drained = [bench.drain_by_turns(turn) for turn in range(1, options.runs + 1)]
    latency = bench.latency()
    report.table(_table(drained) + latency_rows(latency))
    return nothing_lost([turn[-1] for turn in drained] + latency)


class MysqlLoad(Load):
    def at(self, address: str, server: int, gomysql: Path | None) -> None:
        # Bare client and outboxd alike; TLS would be measured otherwise.
        self.address = f"{address}?ssl-mode=disabled"
        self.source = f"{address}{DATABASE}?ssl-mode=disabled"
        self.server, self.gomysql = server, gomysql
        self.begin = self.end = ""

    def sql(self, *statements: str, source: str | None = None) -> list[list[str]]:
        return self.stage.measure("sql", source or self.address, *statements)

    def flags(self, name: str) -> list:
        return ["--name", name]

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

    def drain_by_turns(self, turn: int) -> tuple[dict, dict, dict, dict]:
        say(f"run {turn} of {self.options.runs}")
        bare = self.report.add("bare", run=turn, **self.bare())
        decoding = self.report.add("bare decoding", run=turn, **self.bare("--decode"))
        ordinary = self.ordinary()
        if ordinary:
            self.report.add("go-mysql", run=turn, **ordinary)
        relayed = self.backlog(f"bench_{turn}")
        relayed["of_gomysql"] = relayed["rows_s"] / ordinary["rows_s"] if ordinary else None
        relayed["of_decoding"] = relayed["rows_s"] / decoding["rows_s"]
        relayed["of_bare"] = relayed["rows_s"] / bare["rows_s"]
        self.report.add("outboxd backlog", run=turn, **relayed)
        return bare, decoding, ordinary, relayed

    def bare(self, *more: str) -> dict:
        arguments = ["--from", self.begin, "--until", self.end, "--rows", self.options.rows, "--server", self.server]
        return self.stage.measure("binlog", self.address, *arguments, *more)

    def ordinary(self) -> dict:
        if not self.gomysql:
            return {}
        url = urllib.parse.urlsplit(self.address)
        login = ["-host", url.hostname, "-port", url.port, "-user", url.username, "-password", url.password]
        return self.stage.told(self.gomysql, *login, "-from", self.begin, "-rows", self.options.rows)

    def backlog(self, name: str) -> dict:
        return self.measure_backlog(name, watched=["--server", self.server], flags=["--start", self.begin])


def _table(drained: list[tuple[dict, dict, dict, dict]]) -> list[Row]:
    def of(which: int, name: str) -> list[float | None]:
        return [turn[which].get(name) for turn in drained]

    bare, decoding, gomysql, outboxd = 0, 1, 2, 3
    return [
        Row("outboxd rows/s, first to last", of(outboxd, "rows_s")),
        Row("outboxd rows/s, start included", of(outboxd, "wall_rows_s")),
        Row("bare rows/s", of(bare, "rows_s")),
        Row("bare, decoding every row, rows/s", of(decoding, "rows_s")),
        Row("go-mysql, decoding every row, rows/s", of(gomysql, "rows_s")),
        Row("outboxd / go-mysql", of(outboxd, "of_gomysql"), 2, at_least=0.8),
        Row("outboxd / bare decoding", of(outboxd, "of_decoding"), 2),
        Row("outboxd / bare", of(outboxd, "of_bare"), 2),
        Row("outboxd CPU s/M", of(outboxd, "cpu_s_per_m"), 2, at_most=8),
        Row("bare decoding CPU s/M", of(decoding, "cpu_s_per_m"), 2),
        Row("go-mysql CPU s/M", of(gomysql, "cpu_s_per_m"), 2),
        Row("server CPU s/M, outboxd", of(outboxd, "server_cpu_s_per_m"), 2),
        *delivery_rows(lambda name: of(outboxd, name)),
    ]
