-- One statement a line, as the bootstrap mode wants it. Not logged: the first transaction of a fresh server is a test's own.
SET SESSION sql_log_bin = 0;
-- Where there is no Docker the package's script makes a root without password for each name of this machine.
DELETE FROM mysql.global_priv WHERE User = '' OR User = 'root' AND Host NOT IN ('localhost', '%');
DELETE FROM mysql.proxies_priv WHERE Host NOT IN ('localhost', '%');
-- The bootstrap mode refuses to make users before it has read them.
FLUSH PRIVILEGES;
ALTER USER 'root'@'localhost' IDENTIFIED BY 'mysql';
CREATE USER IF NOT EXISTS 'root'@'%' IDENTIFIED BY 'mysql';
GRANT ALL PRIVILEGES ON *.* TO 'root'@'%' WITH GRANT OPTION;
CREATE USER 'plain_native'@'%' IDENTIFIED VIA mysql_native_password USING PASSWORD('secret');
GRANT SELECT, RELOAD, REPLICATION SLAVE, BINLOG MONITOR, REPLICATION SLAVE ADMIN ON *.* TO 'plain_native'@'%';
-- Any client certificate that the test CA signed, auth_cert.pem for one, and no password.
CREATE USER 'cert_only'@'%' REQUIRE X509;
GRANT SELECT, RELOAD, REPLICATION SLAVE, BINLOG MONITOR, REPLICATION SLAVE ADMIN ON *.* TO 'cert_only'@'%';
