// An order, and in the same transaction the event that tells of it; five times a second.
const session = db.getMongo().startSession();
const shop = session.getDatabase("shop");
if (!db.getCollectionNames().includes("orders")) db.createCollection("orders");

for (;;) {
  const customer = Math.floor(Math.random() * 100);
  const total = Math.round(Math.random() * 50000) / 100;
  session.withTransaction(() => {
    const placed = shop.orders.insertOne({ customer, total });
    shop.outbox.insertOne({
      partition_key: `customer-${customer}`,
      event_type: "OrderPlaced",
      payload: { order: placed.insertedId, customer, total },
    });
  });
  sleep(200);
}
