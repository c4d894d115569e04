// The outbox of the layout `entity`. Runs as it stands (mongosh "mongodb://…/shop" entity.js). What is between /*table*/
// and /**/ is what `outboxd init` puts in: the collection's name. By hand, change it there.
//
//   event_id, event_type, entity_type, entity_id, entity_version    become headers
//   topic, partition_key                                            the Kafka topic and the record's key
//   payload                                                         a document, delivered as JSON
//   status, retry_count, max_retries, last_error, last_error_at, created_at, processing_started_at, published_at,
//   locked_by, locked_until                                         for whoever polls; the log needs none of them
db.runCommand({ "create": /*table*/ "outbox" /**/ })
db.runCommand({ "createIndexes": /*table*/ "outbox" /**/, "indexes": [{ "key": { "event_id": 1 }, "name": "outboxd_event", "unique": true }] })
db.runCommand({ "createIndexes": /*table*/ "outbox" /**/, "indexes": [{ "key": { "entity_id": 1, "entity_version": 1 }, "name": "outboxd_entity" }] })
db.runCommand({ "createIndexes": /*table*/ "outbox" /**/, "indexes": [{ "key": { "status": 1, "created_at": 1, "entity_version": 1, "event_id": 1 }, "name": "outboxd_pending" }] })
db.runCommand({ "createIndexes": /*table*/ "outbox" /**/, "indexes": [{ "key": { "status": 1, "published_at": 1 }, "name": "outboxd_published" }] })
db.runCommand({ "createIndexes": /*table*/ "outbox" /**/, "indexes": [{ "key": { "locked_until": 1 }, "name": "outboxd_lock" }] })
