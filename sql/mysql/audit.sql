-- Who changed a pipeline's position by hand (`outboxd position set`), when, from where to where, and why. Only added to: a
-- change that could not be carried out after all has a second row that says so. `publisher` is null where all are meant.
CREATE TABLE IF NOT EXISTS outboxd_audit (
    id            BIGINT       NOT NULL AUTO_INCREMENT PRIMARY KEY,
    at            TIMESTAMP(6) NOT NULL DEFAULT CURRENT_TIMESTAMP(6),
    pipeline      VARCHAR(191) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL,
    publisher     VARCHAR(191) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NULL,
    action        VARCHAR(64)  NOT NULL,
    position_from LONGTEXT     NULL,
    position_to   LONGTEXT     NOT NULL,
    reason        TEXT CHARACTER SET utf8mb4 NOT NULL,
    database_user VARCHAR(288) NOT NULL,
    os_user       VARCHAR(288) CHARACTER SET utf8mb4 NOT NULL
);
