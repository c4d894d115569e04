// The outbox of the layout `debezium`, as Debezium's outbox event router expects it. Runs as it stands (mongosh
// "mongodb://…/shop" debezium.js). What is between /*table*/ and /**/ is what `outboxd init` puts in: the collection's
// name. By hand, change it there.
//
//   _id            becomes the header `id`
//   aggregatetype  the last part of the topic: outbox.event.{aggregatetype}
//   aggregateid    the record's key: documents of one key arrive in the order of their commits
//   type           for --header eventType=type
//   payload        a document or array is delivered as JSON, a string or binary as it is
db.runCommand({ "create": /*table*/ "outboxevent" /**/ })
