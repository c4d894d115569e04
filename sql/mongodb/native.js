// The outbox of the layout `native`. Runs as it stands (mongosh "mongodb://…/shop" native.js). What is between /*table*/
// and /**/ is what `outboxd init` puts in: the collection's name. By hand, change it there.
//
//   _id            becomes the header `id`, by which consumers recognise a repeated record; of any type
//   topic          the Kafka topic, unless --topic says otherwise
//   partition_key  the record's key: documents of one key arrive in the order of their commits
//   event_type     becomes the header `event_type`
//   payload        a document or array is delivered as JSON, a string or binary as it is
//   headers        a document whose members become headers
//   created_at     a date: the record's timestamp
db.runCommand({ "create": /*table*/ "outbox" /**/ })
// The order in which --snapshot existing reads.
db.runCommand({ "createIndexes": /*table*/ "outbox" /**/, "indexes": [{ "key": { /*timestamp*/ "created_at" /**/: 1, "_id": 1 }, "name": "outboxd_order" }] })
