-- An order, and in the same transaction the event that tells of it.
CREATE TABLE IF NOT EXISTS orders (id bigint AUTO_INCREMENT PRIMARY KEY, customer int, total decimal(10, 2));
SET @customer = CAST(FLOOR(RAND() * 100) AS SIGNED), @total = ROUND(RAND() * 500, 2);

START TRANSACTION;
INSERT INTO orders (customer, total) VALUES (@customer, @total);
INSERT INTO outbox (partition_key, event_type, payload)
VALUES (CONCAT('customer-', @customer), 'OrderPlaced', JSON_OBJECT('id', LAST_INSERT_ID(), 'customer', @customer, 'total', @total));
COMMIT;
