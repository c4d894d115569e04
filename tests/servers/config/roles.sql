-- The roles that pg_hba.conf names. One statement a line: the single-user mode that runs this file outside Docker ends a statement at the line's end.
CREATE ROLE auth_trust LOGIN REPLICATION PASSWORD 'secret';
CREATE ROLE auth_cleartext LOGIN REPLICATION PASSWORD 'secret';
CREATE ROLE auth_scram LOGIN REPLICATION PASSWORD 'secret';
CREATE ROLE auth_cert LOGIN REPLICATION PASSWORD 'secret';
CREATE ROLE tls_only LOGIN REPLICATION PASSWORD 'secret';
-- The md5 method falls back to SCRAM for a role whose stored password is a SCRAM verifier, so this role needs an MD5 hash.
SET password_encryption = 'md5';
CREATE ROLE auth_md5 LOGIN REPLICATION PASSWORD 'secret';
