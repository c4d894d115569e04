"""Receipts: a relay and a confirmer at work on one large table, while rows come in at a steady rate.

The table of the layout `produce-receive` is loaded with rows that are done with. Then rows are added at a steady rate,

    outboxd run --capture poll     delivers them and marks them produced
    outboxd confirm                reads the topic and marks them received

so that both write to the same rows, at nearly the same moment. The server says how many statements that took and how many of
them waited for a lock (PostgreSQL: waits of a millisecond and more, by its log; MySQL: every wait of a row lock); the
confirmer's own log says how long each took.
"""

import argparse
import os
import re
import signal
import statistics
import subprocess
import time
from pathlib import Path

from servers.failure import Failure
from servers.mysql import Mysql

from .load import PARTITIONS, Load
from .report import Report, Row
from .stage import BenchKafka, BenchPostgres, Stage, say

SUMMARY = "receipts: relay and confirmer on one table of millions of rows"
DATABASE = "bench"
TOPIC = "bench_receipts"
PATIENCE = 300
# A batch that was full, or nearly: what "an update of 1000 rows" means.
FULL = 900


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--rows", type=int, default=10_000_000, help="rows that are in the table before (%(default)s)")
    add("--rate", type=int, default=10_000, help="rows that are added a second (%(default)s)")
    add("--seconds", type=int, default=60, help="that the rate is held (%(default)s)")
    add("--payload", type=int, default=200, metavar="BYTES", help="size of each payload (%(default)s)")
    add("--capture", choices=["poll", "log"], default="poll", help="how the relay finds rows (%(default)s)")
    add("--on", choices=["postgres", "mysql"], action="append", default=[], help="only this one; repeatable (both)")
    add("--outboxd", type=Path, metavar="PROGRAM", help="measure this program instead of building one")
    add("--confirm", action="append", default=[], metavar="FLAG=VALUE", help="handed to outboxd confirm, as batch=500")
    add("--keep-logs", type=Path, metavar="DIR", help="where outboxd's logs go")
    parser.set_defaults(kafka=[], rows_per_commit=None)


def run(stage: Stage, report: Report, options: argparse.Namespace) -> bool:
    stage.build()
    brokers, broker = stage.start(BenchKafka())
    rows: list[Row] = []
    missing = 0
    for name in options.on or ["postgres", "mysql"]:
        bench = BENCHES[name](stage, report, options, brokers, broker.pid)
        bench.at(*stage.start(bench.server()))
        bench.tell_setting(bench.title(), rate=options.rate, seconds=options.seconds, capture=options.capture)
        measured = bench.measure()
        report.add(f"receipts, {name}", **measured)
        rows += table(name, measured)
        missing += measured["missing"]
    report.table(rows)
    if missing:
        say(f"{missing} rows have no receipt")
    return not missing


def table(name: str, measured: dict) -> list[Row]:
    def row(title: str, figure: str, digits: int = 0, **target) -> Row:
        return Row(f"{name}: {title}", [measured[figure]], digits, **target)

    return [
        row("messages/s", "messages_s"),
        row("statements per million messages", "statements_per_m"),
        row("times fewer than row by row", "times_fewer", at_least=500),
        row("lock waits, % of statements", "lock_waits_percent", 2, at_most=5),
        row("update of 1000 rows, median ms", "full_p50_ms", 1),
        row("update of 1000 rows, p99 ms", "full_p99_ms", 1),
        row("confirmer CPU s/M", "cpu_s_per_m", 2),
        row("confirmer peak RSS, MiB", "peak_rss_mib", 1, at_most=100),
        row("rows without a receipt", "missing", at_most=0),
    ]


class ConfirmLoad(Load):
    name: str

    def server(self):
        raise NotImplementedError

    def at(self, address: str, process) -> None:
        raise NotImplementedError

    def title(self) -> str:
        raise NotImplementedError

    def sql(self, *statements: str) -> list[list[str]]:
        return self.stage.measure("sql", self.source, *statements)

    def load(self) -> None:
        """Makes the table, full of rows that are done with, and what adds more."""
        raise NotImplementedError

    def feed(self) -> None:
        """Adds rows at the rate, and returns when all are added."""
        raise NotImplementedError

    def counts(self) -> dict:
        """What the server has counted so far: `confirming`, `marking` and `waits`."""
        raise NotImplementedError

    def flags(self, name: str) -> list:
        return ["--layout", "produce-receive", "--capture", self.options.capture]

    def number(self, query: str) -> int:
        return int(self.sql(query)[0][0])

    def measure(self) -> dict:
        options = self.options
        say(f"{self.name}: loading {options.rows:,} rows")
        began = time.monotonic()
        self.load()
        say(f"{self.name}: loaded in {time.monotonic() - began:.0f} s; adding {options.rate:,} rows/s for {options.seconds} s")
        topic = f"{TOPIC}_{self.name}"
        relay = self.start("relay", *self.command(topic)[1:], "--create-topics", PARTITIONS)
        confirm = [word for setting in options.confirm for word in (f"--{setting.split('=')[0]}", setting.split("=")[1])]
        confirmer = self.start(
            "confirmer", "confirm", self.source, "--layout", "produce-receive", "--brokers", self.brokers,
            *["--topic", topic, "--create-topics", PARTITIONS, "--admin", "off", *confirm],
        )
        self.until_reading(confirmer)
        before = self.counts()
        began = time.monotonic()
        self.feed()
        fed = time.monotonic() - began
        total = options.rate // 100 * 100 * options.seconds
        self.until_received()
        after = self.counts()
        usage = self.usage(confirmer)
        for process in (confirmer, relay):
            process.send_signal(signal.SIGTERM)
            if process.wait(60) != 0:
                raise Failure(f"outboxd ended with {process.returncode}")
        counted = {name: after[name] - before[name] for name in after}
        spans = self.spans()
        full = sorted(micros for ids, micros in spans if ids >= FULL) or [0]
        everything = sorted(micros for _, micros in spans)
        statements = counted["confirming"]
        written = counted["confirming"] + counted["marking"]
        return {
            "messages": total,
            "messages_s": total / fed,
            "statements": statements,
            "statements_by_own_count": len(spans),
            "statements_per_m": statements * 1e6 / total,
            "times_fewer": total / max(statements, 1),
            "marking_statements": counted["marking"],
            "lock_waits": counted["waits"],
            "lock_waits_percent": 100 * counted["waits"] / max(written, 1),
            "full_updates": len(full),
            "full_p50_ms": statistics.median(full) / 1000,
            "full_p99_ms": quantile(full, 0.99) / 1000,
            "any_p50_ms": statistics.median(everything) / 1000,
            "any_p99_ms": quantile(everything, 0.99) / 1000,
            "cpu_s_per_m": usage["cpu_s"] * 1e6 / total,
            "peak_rss_mib": usage["peak_rss_mib"],
            "missing": self.number("SELECT count(*) FROM outbox WHERE received_at IS NULL")
            + options.rows + total - self.number("SELECT count(*) FROM outbox"),
        }

    def log_of(self, role: str) -> Path:
        return self.logs / f"{self.name}_{role}.log"

    def start(self, role: str, *words: object) -> subprocess.Popen:
        command = [str(self.outboxd), *map(str, words), "--log-format", "text"]
        environment = {**os.environ, "RUST_LOG": "info,outboxd::confirm=debug"}
        with self.log_of(role).open("w") as log:
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)

    def until_reading(self, confirmer: subprocess.Popen) -> None:
        deadline = time.monotonic() + PATIENCE
        while not re.search(r"reading.*partitions=[1-9]", self.log_of("confirmer").read_text()):
            if confirmer.poll() is not None or time.monotonic() > deadline:
                raise Failure(f"the confirmer reads nothing: {self.log_of('confirmer').read_text()[-2000:]}")
            time.sleep(0.1)

    def until_received(self) -> None:
        deadline = time.monotonic() + PATIENCE
        pending = "SELECT count(*) FROM (SELECT 1 FROM outbox WHERE received_at IS NULL LIMIT 1) AS pending"
        while self.number(pending):
            if time.monotonic() > deadline:
                say(f"{self.name}: receipts are still missing after {PATIENCE} s")
                return
            time.sleep(0.5)

    def spans(self) -> list[tuple[int, int]]:
        """How many ids each statement had, and how many microseconds it took."""
        written = re.compile(r"receipts written.* ids=(\d+) .*micros=(\d+)")
        found = (written.search(line) for line in self.log_of("confirmer").open())
        return [(int(match[1]), int(match[2])) for match in found if match]

    @staticmethod
    def usage(process: subprocess.Popen) -> dict:
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        cpu = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        status = Path(f"/proc/{process.pid}/status").read_text()
        return {"cpu_s": cpu, "peak_rss_mib": int(re.search(r"VmHWM:\s+(\d+)", status)[1]) / 1024}


def quantile(ordered: list[int], share: float) -> int:
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


PAYLOAD = "jsonb_build_object('n', n, 'note', left(repeat(md5(n::text), 8), {bytes} - 30))"

POSTGRES_FEED = """
CREATE PROCEDURE feed(rate int, seconds int) LANGUAGE plpgsql AS $$
DECLARE
    began timestamptz := clock_timestamp();
BEGIN
    FOR step IN 1 .. seconds * 100 LOOP
        INSERT INTO outbox (stid, code, payload)
        SELECT 'k-' || n % 1000, 'made', {payload} FROM generate_series(step * (rate / 100), (step + 1) * (rate / 100) - 1) n;
        COMMIT;
        PERFORM pg_sleep(greatest(0, extract(epoch FROM began + step * interval '10 ms' - clock_timestamp())));
    END LOOP;
END $$
"""


class BenchObserved(BenchPostgres):
    # A wait for a lock is logged when it is as long as a look for deadlocks waits. Rows are updated twice: a table that is
    # never vacuumed is none that people have.
    settings = {
        **BenchPostgres.settings,
        "autovacuum": "on",
        "autovacuum_naptime": "10s",
        "log_lock_waits": "on",
        "deadlock_timeout": "1ms",
        "shared_preload_libraries": "pg_stat_statements",
    }


class PostgresConfirm(ConfirmLoad):
    name = "postgres"

    def server(self) -> BenchObserved:
        return BenchObserved()

    def at(self, address: str, process) -> None:
        self.source = f"{address}?sslmode=disable"
        self.server_log = self.stage.folder / "postgres" / "server.log"

    def title(self) -> str:
        return "PostgreSQL " + self.sql("SHOW server_version")[0][0]

    def load(self) -> None:
        options = self.options
        payload = PAYLOAD.format(bytes=options.payload)
        self.stage.run(self.outboxd, "init", self.source, *self.flags(""))
        self.sql(
            "CREATE EXTENSION pg_stat_statements",
            POSTGRES_FEED.format(payload=payload),
            "SET synchronous_commit = off",
            f"""INSERT INTO outbox (stid, code, payload, processed, publish, produced_at, received_at)
                SELECT 'k-' || n % 1000, 'made', {payload}, 1, 1, now() - ({options.rows} - n) * interval '1 ms',
                       now() - ({options.rows} - n) * interval '1 ms'
                FROM generate_series(1, {options.rows}) n""",
            "VACUUM ANALYZE outbox",
            "CHECKPOINT",
            "SELECT 1",
        )

    def feed(self) -> None:
        self.sql("SET synchronous_commit = off", f"CALL feed({self.options.rate}, {self.options.seconds})", "SELECT 1")

    def counts(self) -> dict:
        calls = "SELECT coalesce(sum(calls), 0) FROM pg_stat_statements WHERE query LIKE 'UPDATE%' AND query LIKE '%{}%'"
        return {
            "confirming": self.number(calls.format('SET "received_at"')),
            "marking": self.number(calls.format('"processed" = ')),
            "waits": self.server_log.read_text(errors="replace").count("still waiting for"),
        }


MYSQL_PAYLOAD = "JSON_OBJECT('n', n, 'note', LEFT(REPEAT(SHA2(n, 256), 4), {bytes} - 30))"

MYSQL_LOAD = """
CREATE PROCEDURE load_done(total BIGINT, batch BIGINT)
BEGIN
    DECLARE done BIGINT DEFAULT 0;
    WHILE done < total DO
        INSERT INTO outbox (stid, code, payload, processed, publish, produced_at, received_at)
        SELECT CONCAT('k-', MOD(n, 1000)), 'made', {payload}, 1, 1, NOW(6), NOW(6) - INTERVAL (total - n) MICROSECOND
        FROM (SELECT done + number AS n FROM numbers WHERE number <= LEAST(batch, total - done)) AS numbered ORDER BY n;
        SET done = done + batch;
    END WHILE;
END
"""

MYSQL_FEED = """
CREATE PROCEDURE feed(rate BIGINT, seconds BIGINT)
BEGIN
    DECLARE step BIGINT DEFAULT 1;
    DECLARE began DATETIME(6) DEFAULT NOW(6);
    WHILE step <= seconds * 100 DO
        INSERT INTO outbox (stid, code, payload)
        SELECT CONCAT('k-', MOD(n, 1000)), 'made', {payload}
        FROM (SELECT step * (rate DIV 100) + number AS n FROM numbers WHERE number <= rate DIV 100) AS numbered ORDER BY n;
        DO SLEEP(GREATEST(0, TIMESTAMPDIFF(MICROSECOND, SYSDATE(6), began + INTERVAL step * 10000 MICROSECOND) / 1000000));
        SET step = step + 1;
    END WHILE;
END
"""


class MysqlConfirm(ConfirmLoad):
    name = "mysql"

    def server(self) -> Mysql:
        return Mysql()

    def at(self, address: str, process) -> None:
        self.source = f"{address}{DATABASE}?ssl-mode=disabled"
        # The tests' server is a small one.
        self.stage.measure(
            "sql", f"{address}?ssl-mode=disabled", f"CREATE DATABASE {DATABASE}",
            "SET GLOBAL innodb_buffer_pool_size = 512 * 1024 * 1024",
            "SET GLOBAL innodb_redo_log_capacity = 2 * 1024 * 1024 * 1024", "SELECT 1",
        )

    def title(self) -> str:
        return "MySQL " + self.sql("SELECT VERSION()")[0][0]

    def load(self) -> None:
        options, batch = self.options, 10_000
        payload = MYSQL_PAYLOAD.format(bytes=options.payload)
        self.stage.run(self.outboxd, "init", self.source, *self.flags(""))
        self.sql(
            "CREATE TABLE numbers (number BIGINT PRIMARY KEY)",
            f"SET SESSION cte_max_recursion_depth = {batch + 1}",
            f"INSERT INTO numbers WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {batch})"
            " SELECT i FROM n",
            MYSQL_LOAD.format(payload=payload),
            MYSQL_FEED.format(payload=payload),
            "SET SESSION sql_log_bin = 0",
            f"CALL load_done({options.rows}, {batch})",
            "ANALYZE TABLE outbox",
            "SELECT 1",
        )

    def feed(self) -> None:
        self.sql(f"CALL feed({self.options.rate}, {self.options.seconds})", "SELECT 1")

    def counts(self) -> dict:
        calls = (
            "SELECT coalesce(sum(count_star), 0) FROM performance_schema.events_statements_summary_by_digest"
            " WHERE digest_text LIKE 'UPDATE%' AND digest_text LIKE '%SET `{}`%'"
        )
        return {
            "confirming": self.number(calls.format("received_at")),
            "marking": self.number(calls.format("processed")),
            "waits": int(self.sql("SHOW GLOBAL STATUS LIKE 'Innodb_row_lock_waits'")[0][1]),
        }


BENCHES = {"postgres": PostgresConfirm, "mysql": MysqlConfirm}
