// A user that may relay and nothing else. Run it after `outboxd init` in the database of the outbox, here `shop`
// (mongosh "mongodb://…/shop" role.js), with the names and the password changed to yours.
db.runCommand({ "createRole": "outboxd", "privileges": [
    // To watch the outbox, and to read it for --snapshot existing. With several collections, or --table '*', put
    // "collection": "", which means all of the database; with several databases "db": "" as well, which means all.
    { "resource": { "db": "shop", "collection": "outbox" }, "actions": ["find", "changeStream"] },
    // Who runs it, and where it stands. No remove: giving a position up is a person's decision.
    { "resource": { "db": "shop", "collection": "outboxd_checkpoint" }, "actions": ["find", "insert", "update"] }
], "roles": [] })
// To tell how far the oplog reaches back (check, --start earliest, the report of a gap); not needed to relay:
// db.grantRolesToRole("outboxd", [{ role: "read", db: "local" }])
// Only for --dead-letter collection:outboxd_dead_letters; `remove` only for who purges (`outboxd dlq purge`):
// db.grantPrivilegesToRole("outboxd", [{ resource: { db: "shop", collection: "outboxd_dead_letters" },
//     actions: ["find", "insert", "update", "remove"] }])
// Only for who sets positions by hand (`outboxd position set`); the record can be added to and not changed:
// db.grantPrivilegesToRole("outboxd", [{ resource: { db: "shop", collection: "outboxd_audit" }, actions: ["insert"] }])
// Only for --capture poll, or --mark: documents are claimed and marked in the collection itself.
// db.grantPrivilegesToRole("outboxd", [{ resource: { db: "shop", collection: "outbox" }, actions: ["find", "update"] }])
// Only for retention (--prune-after, `outboxd prune`):
// db.grantPrivilegesToRole("outboxd", [{ resource: { db: "shop", collection: "outbox" }, actions: ["find", "remove"] }])
db.runCommand({ "createUser": "outboxd", "pwd": "change me", "roles": ["outboxd"] })
