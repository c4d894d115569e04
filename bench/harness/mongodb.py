"""MongoDB's change stream to Kafka: a backlog drained, and the latency of single inserts.

One backlog is loaded and is drained by turns

    by a bare reader that discards every event            the limit that the server sets
    by the same, asking for no more than outboxd does     what the server makes of a $match and a $project
    by the Go driver, where Go is installed               an ordinary client
    by outboxd run --until-caught-up                      to a new topic of a real broker

each time from the same position. Then documents are inserted one by one at a steady rate with outboxd running, and the
time until a consumer has them is taken; the control is the same harness producing to Kafka without database and relay.
"""

import argparse
from pathlib import Path

from servers.mongodb import Mongodb

from . import load
from .load import Load, delivery_rows, latency_rows, nothing_lost
from .report import Report, Row
from .stage import BenchKafka, Stage, say

SUMMARY = "a backlog and single inserts, MongoDB's change stream to Kafka"
DATABASE = "bench"

add_options = load.add_options


def run(stage: Stage, report: Report, options: argparse.Namespace) -> bool:
    stage.build()
    gomongo = stage.build_peer("gomongo")
    brokers, broker = stage.start(BenchKafka())
    address, server = stage.start(Mongodb())
    bench = MongodbLoad(stage, report, options, brokers, broker.pid)
    bench.at(address, server.pid, gomongo)
    bench.tell_setting(Mongodb.title)
    bench.load()
    bench.warm_broker()
    drained = [bench.drain_by_turns(turn) for turn in range(1, options.runs + 1)]
    latency = bench.latency()
    report.table(_table(drained) + latency_rows(latency))
    return nothing_lost([turn[-1] for turn in drained] + latency)


class MongodbLoad(Load):
    def at(self, address: str, server: int, gomongo: Path | None) -> None:
        self.source = address.replace("/?", f"/{DATABASE}?")
        self.server, self.gomongo = server, gomongo
        self.begin = ""

    def flags(self, name: str) -> list:
        return ["--name", name]

    def load(self) -> None:
        options = self.options
        say(f"loading {options.rows:,} documents in transactions of {options.rows_per_commit:,}")
        self.stage.run(self.outboxd, "init", self.source, "--name", "made_by_init")
        shape = ["--rows", options.rows, "--rows-per-commit", options.rows_per_commit, "--payload", options.payload]
        loaded = self.stage.measure("documents", self.source, *shape)
        self.begin = loaded["begin"]
        self.report.add("load", **loaded)

    def drain_by_turns(self, turn: int) -> tuple[dict, dict, dict, dict]:
        say(f"run {turn} of {self.options.runs}")
        bare = self.report.add("bare", run=turn, **self.bare())
        asking = self.report.add("bare projecting", run=turn, **self.bare("--project"))
        ordinary = self.ordinary()
        if ordinary:
            self.report.add("Go driver", run=turn, **ordinary)
        relayed = self.backlog(f"bench_{turn}")
        relayed["of_go"] = relayed["rows_s"] / ordinary["rows_s"] if ordinary else None
        relayed["of_asking"] = relayed["rows_s"] / asking["rows_s"]
        relayed["of_bare"] = relayed["rows_s"] / bare["rows_s"]
        self.report.add("outboxd backlog", run=turn, **relayed)
        return bare, asking, ordinary, relayed

    def bare(self, *more: str) -> dict:
        arguments = ["--from", self.begin, "--rows", self.options.rows, "--server", self.server]
        return self.stage.measure("changes", self.source, *arguments, *more)

    def ordinary(self) -> dict:
        if not self.gomongo:
            return {}
        arguments = ["-source", self.source, "-database", DATABASE, "-from", self.begin, "-rows", self.options.rows]
        return self.stage.told(self.gomongo, *arguments)

    def backlog(self, name: str) -> dict:
        return self.measure_backlog(name, watched=["--server", self.server], flags=["--start", self.begin])


def _table(drained: list[tuple[dict, dict, dict, dict]]) -> list[Row]:
    def of(which: int, name: str) -> list[float | None]:
        return [turn[which].get(name) for turn in drained]

    bare, asking, go, outboxd = 0, 1, 2, 3
    return [
        Row("outboxd events/s, first to last", of(outboxd, "rows_s")),
        Row("outboxd events/s, start included", of(outboxd, "wall_rows_s")),
        Row("bare events/s", of(bare, "rows_s")),
        Row("bare, projecting, events/s", of(asking, "rows_s")),
        Row("Go driver events/s", of(go, "rows_s")),
        Row("outboxd / bare", of(outboxd, "of_bare"), 2, at_least=0.7),
        Row("outboxd / bare projecting", of(outboxd, "of_asking"), 2),
        Row("outboxd / Go driver", of(outboxd, "of_go"), 2, at_least=0.7),
        Row("outboxd CPU s/M", of(outboxd, "cpu_s_per_m"), 2),
        Row("bare CPU s/M", of(bare, "cpu_s_per_m"), 2),
        Row("server CPU s/M, bare", of(bare, "server_cpu_s_per_m"), 2),
        Row("server CPU s/M, outboxd", of(outboxd, "server_cpu_s_per_m"), 2),
        *delivery_rows(lambda name: of(outboxd, name)),
    ]
