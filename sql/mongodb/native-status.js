// The index that polling needs beside those of the layout `native`. Runs as it stands (mongosh native-status.js). A document
// is pending when its status is "pending"; whoever writes it sets that.
db.runCommand({ "createIndexes": /*table*/ "outbox" /**/, "indexes": [{ "key": { "status": 1, /*timestamp*/ "created_at" /**/: 1, "_id": 1 }, "name": "outboxd_pending" }] })
