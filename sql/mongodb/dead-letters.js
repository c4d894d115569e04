// Where events wait that could not be delivered, for `--dead-letter collection:outboxd_dead_letters` and `outboxd dlq`. Runs as
// it stands (mongosh "mongodb://…/shop" dead-letters.js). What is between /*table*/ and /**/ is what `outboxd init` puts in:
// the collection's name. By hand, change it there.
//
//   fingerprint   the same for the same event of the same commit, so that a repeat after a crash makes no second letter
//   event_id      the event's id, where it has one
//   topic         where it should have gone; null when it never became a record
//   key, value    the record's, byte for byte
//   headers       the record's: an array of [name, value], where a value that is no text is {"base64": "…"}
//   position      the commit it was part of
//   replayed_at   when it was sent again and acknowledged; else null
//   claimed_until while somebody sends it again
//
// and pipeline, publisher, source_table, reason, attempts, failed_at.
db.runCommand({ "create": /*table*/ "outboxd_dead_letters" /**/ })
db.runCommand({ "createIndexes": /*table*/ "outboxd_dead_letters" /**/, "indexes": [{ "key": { "fingerprint": 1 }, "name": "outboxd_fingerprint", "unique": true }] })
db.runCommand({ "createIndexes": /*table*/ "outboxd_dead_letters" /**/, "indexes": [{ "key": { "pipeline": 1, "publisher": 1, "replayed_at": 1, "_id": 1 }, "name": "outboxd_waiting" }] })
