// Lets the server delete documents that were delivered longer ago than this, for `outboxd init --ttl 30d`. Runs as it stands
// (mongosh "mongodb://…/shop" ttl.js). Only a document whose status says that it was delivered is in the index, so that no
// other one can expire: --capture poll sets that status, and whoever else marks documents as delivered.
db.runCommand({ "createIndexes": /*table*/ "outbox" /**/, "indexes": [{ "key": { /*done_at*/ "published_at" /**/: 1 }, "name": "outboxd_ttl", "expireAfterSeconds": /*seconds*/ 2592000 /**/, "partialFilterExpression": { "status": /*done*/ "published" /**/ } }] })
