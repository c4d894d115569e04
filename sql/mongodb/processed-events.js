// What a consumer remembers, in its own database: the events that it has processed, and the last version of each entity.
// Runs as it stands (mongosh "mongodb://…/billing" processed-events.js). How it is used is in docs/consumers.md: in the same
// transaction as whatever the consumer does with the event.
//
//   processed_events     consumer_group, event_id, entity_type, entity_id, entity_version, processed_at
//   processed_versions   consumer_group, entity_type, entity_id, entity_version: one document an entity, the one that two
//                        transactions with events of one entity conflict on
db.runCommand({ "create": "processed_events" })
db.runCommand({ "createIndexes": "processed_events", "indexes": [{ "key": { "consumer_group": 1, "event_id": 1 }, "name": "processed_events_event", "unique": true }] })
db.runCommand({ "createIndexes": "processed_events", "indexes": [{ "key": { "processed_at": 1 }, "name": "processed_events_processed_at" }] })
db.runCommand({ "create": "processed_versions" })
db.runCommand({ "createIndexes": "processed_versions", "indexes": [{ "key": { "consumer_group": 1, "entity_type": 1, "entity_id": 1 }, "name": "processed_versions_entity", "unique": true }] })
