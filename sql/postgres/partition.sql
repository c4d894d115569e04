-- One day of a table that is partitioned by its timestamp (`outboxd init --partition-by day`). The running relay, `outboxd
-- prune` and a repeated `init` keep a week of them ahead; by hand, change the names and the days. Runs beside writers: to
-- attach a table takes no lock that they wait for. It fails when the default partition holds rows of that day; then they
-- stay there, and so does the day.
CREATE TABLE /*partition*/ outbox_p20250131 /**/
    (LIKE /*table*/ outbox /**/ INCLUDING DEFAULTS INCLUDING CONSTRAINTS INCLUDING GENERATED INCLUDING STORAGE);
ALTER TABLE /*table*/ outbox /**/ ATTACH PARTITION /*partition*/ outbox_p20250131 /**/
    FOR VALUES FROM (/*from*/ '2025-01-31 00:00:00+00' /**/) TO (/*to*/ '2025-02-01 00:00:00+00' /**/);
