// Who changed a pipeline's position by hand (`outboxd position set`), when, from where to where, and why. Only added to.
db.runCommand({ "create": "outboxd_audit" })
