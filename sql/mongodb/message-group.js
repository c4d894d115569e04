// The outbox of the layout `message-group`. Runs as it stands (mongosh "mongodb://…/outbox" message-group.js) for the
// first of its two collections, which look alike. What is between /*table*/ and /**/ is what `outboxd init` puts in: the
// collection's name. By hand, change it there.
//
//   _id, type            become headers; type is EVENT or DISPATCH_JOB, and an HTTP sink has a path for each
//   messageGroup         the record's key
//   payload              a text, delivered as it is, or a document, delivered as JSON
//   status, retryCount, createdAt, processedAt, errorMessage    for whoever polls; the log needs none but createdAt
db.runCommand({ "create": /*table*/ "outbox_events" /**/ })
db.runCommand({ "createIndexes": /*table*/ "outbox_events" /**/, "indexes": [{ "key": { "status": 1, "messageGroup": 1, "createdAt": 1, "_id": 1 }, "name": "outboxd_pending" }] })
