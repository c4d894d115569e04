-- What belongs to no day that has a partition: so that no insert ever fails, whoever has forgotten to make one, and however
-- old the timestamp is. Rows here are deleted one by one.
CREATE TABLE /*partition*/ outbox_default /**/ PARTITION OF /*table*/ outbox /**/ DEFAULT;
