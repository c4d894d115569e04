-- Where each pipeline stands. outboxd writes it only behind the acknowledgements of the broker.
CREATE TABLE IF NOT EXISTS outboxd_checkpoint (
    pipeline   VARCHAR(191) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL PRIMARY KEY,
    format     INT          NOT NULL,
    source     VARCHAR(16)  NOT NULL,
    server     VARCHAR(64)  NOT NULL,
    position   LONGTEXT     NOT NULL,
    file       VARCHAR(512) NOT NULL,
    snapshot   VARCHAR(16)  NOT NULL,
    updated_at TIMESTAMP(6) NOT NULL DEFAULT CURRENT_TIMESTAMP(6) ON UPDATE CURRENT_TIMESTAMP(6)
);
