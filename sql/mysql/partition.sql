-- Days of a table that is partitioned by its timestamp (`outboxd init --partition-by day`), cut off from `pmax`, which takes
-- what belongs to no day yet: so that no insert ever fails, whoever has forgotten to make one. The running relay, `outboxd
-- prune` and a repeated `init` keep a week of them ahead; by hand, change the names and the days. Writers wait meanwhile,
-- which is a moment when `pmax` is empty or nearly so.
ALTER TABLE /*table*/ outbox /**/ REORGANIZE PARTITION pmax INTO (
    /*days*/ PARTITION p20250131 VALUES LESS THAN ('2025-02-01 00:00:00') /**/,
    PARTITION pmax VALUES LESS THAN (MAXVALUE)
);
