// Who runs each pipeline, and where it stands. outboxd writes positions only behind the acknowledgements of the broker.
db.runCommand({ "create": "outboxd_checkpoint" })
