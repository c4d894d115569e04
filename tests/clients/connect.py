"""What two clients of Kafka Connect see of outboxd, or tell it to do; printed as JSON.

connect.py URL [--auth USER:PASSWORD] watch NAME | pause NAME | resume NAME | restart NAME | restart-failed NAME |
           restart-task NAME TASK | cycle NAME | refused NAME
"""

import json
import sys
import urllib.parse

import requests
from kafka_connect import KafkaConnect
from kafka_connect_api.kafka_connect_api import Api, Cluster


def watch(client: KafkaConnect, cluster: Cluster, name: str) -> dict:
    connector = cluster.connectors[name]
    return {
        "cluster": client.get_cluster_info(),
        "connectors": client.list_connectors(),
        "running": client.list_connectors(state="RUNNING"),
        "expanded_status": client.list_connectors(expand="status"),
        "expanded_info": client.list_connectors(expand="info"),
        "info": client.get_connector(name),
        "config": client.get_connector_config(name),
        "status": client.get_connector_status(name),
        "tasks": client.list_connector_tasks(name),
        "task_status": client.get_connector_task_status(name, 0),
        "topics": client.list_connector_topics(name),
        "plugins": client.list_connector_plugins(),
        # The other client.
        "version": cluster.version,
        "kafka_cluster": cluster.kafka_cluster,
        "exists": connector.exists(),
        "state": connector.state,
        "class": connector.connector_class,
        "tasks_running": [task.is_running() for task in connector.tasks],
    }


def refused(call) -> dict:
    """The error as Connect's clients get it."""
    try:
        call()
    except requests.exceptions.HTTPError as error:
        return {"status": error.response.status_code, "body": error.response.json()}
    return {"status": None}


def main(url: str, arguments: list[str]) -> object:
    auth = None
    if arguments[0] == "--auth":
        auth, arguments = arguments[1], arguments[2:]
    user, _, password = (auth or "").partition(":")
    place = urllib.parse.urlsplit(url)
    client = KafkaConnect(url, auth=auth)
    cluster = Cluster(
        Api(hostname=place.hostname, port=place.port, protocol="http", username=user or None, password=password or None)
    )
    match arguments:
        case ["watch", name]:
            return watch(client, cluster, name)
        case ["pause", name]:
            return client.pause_connector(name)
        case ["resume", name]:
            return client.resume_connector(name)
        case ["restart", name]:
            return client.restart_connector(name)
        case ["restart-failed", name]:
            return client.restart_connector(name, include_tasks=True, only_failed=True)
        case ["restart-task", name, task]:
            return client.restart_connector_task(name, task)
        case ["cycle", name]:
            return cluster.connectors[name].cycle_connector()
        case ["refused", name]:
            return {
                "get": refused(lambda: client.get_connector(name)),
                "status": refused(lambda: client.get_connector_status(name)),
                "pause": refused(lambda: client.pause_connector(name)),
                "create": refused(lambda: client.create_connector({"name": name, "config": {}})),
                "delete": refused(lambda: client.delete_connector(name)),
            }
    raise SystemExit(__doc__)


if __name__ == "__main__":
    json.dump(main(sys.argv[1], sys.argv[2:]), sys.stdout, default=str)
