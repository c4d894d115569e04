-- A user that may relay and nothing else. Run it after `outboxd init`, with the names and the password changed to yours;
-- `shop` is the database of the outbox.
CREATE USER 'outboxd'@'%' IDENTIFIED BY 'change me';

-- To read the log. It is the log of the whole server; there is no finer right.
GRANT REPLICATION SLAVE, REPLICATION CLIENT ON *.* TO 'outboxd'@'%';
-- Only on MariaDB 10.5.2 and later, where it stands for a part of REPLICATION CLIENT:
-- GRANT BINLOG MONITOR ON *.* TO 'outboxd'@'%';

-- Where it stands. No DELETE: giving a position up is a person's decision.
GRANT SELECT, INSERT, UPDATE ON shop.outboxd_checkpoint TO 'outboxd'@'%';

-- Only for who sets positions by hand (`outboxd position set`); the record can be added to and not changed:
-- GRANT INSERT ON shop.outboxd_audit TO 'outboxd'@'%';

-- To look up the table's columns, and for --snapshot existing.
GRANT SELECT ON shop.outbox TO 'outboxd'@'%';
-- Only for --snapshot existing on a server without GTIDs:
-- GRANT LOCK TABLES ON shop.* TO 'outboxd'@'%';

-- Only for --dead-letter table:outboxd_dead_letters:
-- GRANT SELECT, INSERT ON shop.outboxd_dead_letters TO 'outboxd'@'%';
-- And for who replays and purges (`outboxd dlq`):
-- GRANT SELECT, UPDATE, DELETE ON shop.outboxd_dead_letters TO 'outboxd'@'%';

-- Only for --mark, which writes the status of delivered rows:
-- GRANT SELECT, UPDATE ON shop.outbox TO 'outboxd'@'%';

-- Only for --capture poll, which needs neither of the first two rights: rows are claimed and marked in the table itself.
-- GRANT SELECT, UPDATE ON shop.outbox TO 'outboxd'@'%';

-- Only for retention (--prune-after, `outboxd prune`): rows are found by SELECT and deleted by DELETE.
-- GRANT SELECT, DELETE ON shop.outbox TO 'outboxd'@'%';
-- And to make and drop partitions, where the table has some. LOCK TABLES is a right on the whole database.
-- GRANT ALTER, CREATE, INSERT, DROP ON shop.outbox TO 'outboxd'@'%';
-- GRANT LOCK TABLES ON shop.* TO 'outboxd'@'%';
