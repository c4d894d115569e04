-- An order, and in the same transaction the event that tells of it; five times a second.
CREATE TABLE IF NOT EXISTS orders (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, customer int, total numeric);

WITH placed AS (
    INSERT INTO orders (customer, total) VALUES (random() * 100, round((random() * 500)::numeric, 2)) RETURNING *
)
INSERT INTO outbox (partition_key, event_type, payload)
SELECT 'customer-' || customer, 'OrderPlaced', to_jsonb(placed) FROM placed
\watch 0.2
