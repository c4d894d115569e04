-- One statement a line, as --init-file wants it. Not logged: the first transaction of a fresh server is a test's own.
SET SESSION sql_log_bin = 0;
ALTER USER 'root'@'localhost' IDENTIFIED BY 'mysql';
CREATE USER IF NOT EXISTS 'root'@'%' IDENTIFIED BY 'mysql';
GRANT ALL PRIVILEGES ON *.* TO 'root'@'%' WITH GRANT OPTION;
CREATE USER 'plain_sha2'@'%' IDENTIFIED WITH caching_sha2_password BY 'secret';
GRANT SELECT, RELOAD, REPLICATION SLAVE, REPLICATION CLIENT ON *.* TO 'plain_sha2'@'%';
-- Any client certificate that the test CA signed, auth_cert.pem for one, and no password.
CREATE USER 'cert_only'@'%' REQUIRE X509;
GRANT SELECT, RELOAD, REPLICATION SLAVE, REPLICATION CLIENT ON *.* TO 'cert_only'@'%';
