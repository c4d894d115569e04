//! What a statement in the log means to an outbox.
//!
//! Rows come as rows; statements mark where transactions begin and end, commit what an XA transaction prepared, and
//! change tables. Only the first words are looked at: the text is in the character set of its session, whose ASCII
//! letters are themselves in every set that a session can have.

/// The name of an XA transaction.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Xid {
    pub format: i32,
    pub global: Vec<u8>,
    pub branch: Vec<u8>,
}

impl std::fmt::Display for Xid {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut hex = |prefix: &str, bytes: &[u8]| {
            f.write_str(prefix)?;
            bytes.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
        };
        hex("X'", &self.global)?;
        hex("',X'", &self.branch)?;
        write!(f, "',{}", self.format)
    }
}

impl Xid {
    /// `X'6162',X'',1`, or with strings or `0x…`; branch and format may be missing.
    fn parse(text: &[u8]) -> Option<Self> {
        let mut words = Words(text);
        let global = words.literal()?;
        let branch = if words.comma() { words.literal()? } else { Vec::new() };
        let format = if words.comma() { words.number()? } else { 1 };
        Some(Xid { format, global, branch })
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Statement {
    Begin,
    Commit,
    Rollback,
    Savepoint,
    RollbackToSavepoint,
    XaStart(Xid),
    XaEnd(Xid),
    XaPrepare(Xid),
    XaCommit(Xid),
    XaRollback(Xid),
    /// An XA statement whose transaction's name cannot be read; never skipped.
    XaUnreadable,
    /// CREATE, ALTER, DROP, RENAME or TRUNCATE of tables; see [`mentions`].
    Ddl,
    /// Rows that were changed by a statement and not logged as rows: `binlog_format` is not ROW; see [`mentions`].
    Change,
    Other,
}

pub fn classify(sql: &[u8]) -> Statement {
    let mut words = Words(sql);
    let Some(first) = words.word() else { return Statement::Other };
    let is = |word: &[u8], what: &str| word.eq_ignore_ascii_case(what.as_bytes());
    let any = |word: &[u8], of: &[&str]| of.iter().any(|what| is(word, what));
    if is(first, "XA") {
        return xa(words);
    }
    if is(first, "BEGIN") {
        return Statement::Begin;
    }
    if is(first, "COMMIT") {
        return Statement::Commit;
    }
    if is(first, "SAVEPOINT") {
        return Statement::Savepoint;
    }
    if is(first, "ROLLBACK") {
        while let Some(word) = words.word() {
            if is(word, "TO") {
                return Statement::RollbackToSavepoint;
            }
        }
        return Statement::Rollback;
    }
    // A function that is called, and what MariaDB puts before a statement, may write as well.
    const WRITING: [&str; 12] =
        ["INSERT", "REPLACE", "UPDATE", "DELETE", "LOAD", "WITH", "CALL", "SELECT", "DO", "SET", "ANALYZE", "EXPLAIN"];
    if any(first, &WRITING) {
        return Statement::Change;
    }
    if is(first, "TRUNCATE") {
        return Statement::Ddl;
    }
    if any(first, &["CREATE", "ALTER", "DROP", "RENAME"]) {
        // CREATE OR REPLACE TEMPORARY TABLE, ALTER ONLINE IGNORE TABLE, DROP DATABASE: which word it is decides,
        // and it is among the first few.
        for _ in 0..5 {
            match words.word() {
                Some(word) if any(word, &["TABLE", "TABLES", "INDEX", "DATABASE", "SCHEMA"]) => return Statement::Ddl,
                Some(_) => {}
                None => break,
            }
        }
    }
    Statement::Other
}

fn xa(mut words: Words<'_>) -> Statement {
    let verb = words.word().unwrap_or_default();
    let make = match verb.to_ascii_uppercase().as_slice() {
        b"START" | b"BEGIN" => Statement::XaStart,
        b"END" => Statement::XaEnd,
        b"PREPARE" => Statement::XaPrepare,
        b"COMMIT" => Statement::XaCommit,
        b"ROLLBACK" => Statement::XaRollback,
        _ => return Statement::Other,
    };
    Xid::parse(words.0).map_or(Statement::XaUnreadable, make)
}

/// Whether a statement may be about this table: its name stands in it as a whole word, in any case and any quotes, or
/// somewhere in a quoted name. May say yes where the name is only a column's or in a comment, and never no where the
/// table is named (in ASCII; other letters are compared as bytes).
pub fn mentions(sql: &[u8], table: &str) -> bool {
    let table = table.as_bytes();
    let part_of_name = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'$') || byte >= 0x80;
    // A name with a quote in it is doubled in the text.
    if table.is_empty() || table.contains(&b'`') {
        return true;
    }
    sql.windows(table.len()).enumerate().any(|(at, window)| {
        window.eq_ignore_ascii_case(table)
            && !(at > 0 && part_of_name(sql[at - 1]) && part_of_name(table[0]))
            && !sql
                .get(at + table.len())
                .is_some_and(|&next| part_of_name(next) && table.last().is_some_and(|&last| part_of_name(last)))
    })
}

/// The words of a statement; comments and white space are between them.
struct Words<'a>(&'a [u8]);

impl<'a> Words<'a> {
    fn skip_space(&mut self) {
        loop {
            self.0 = self.0.trim_ascii_start();
            let end = match self.0 {
                // What stands in /*! … */ is executed: only its brackets are skipped.
                [b'/', b'*', b'!', rest @ ..] => rest.iter().take_while(|byte| byte.is_ascii_digit()).count() + 3,
                [b'/', b'*', b'M', b'!', rest @ ..] => rest.iter().take_while(|byte| byte.is_ascii_digit()).count() + 4,
                [b'/', b'*', rest @ ..] => {
                    rest.windows(2).position(|pair| pair == b"*/").map_or(self.0.len(), |at| at + 4)
                }
                [b'*', b'/', ..] => 2,
                [b'-', b'-', rest @ ..] | [b'#', rest @ ..] => {
                    let line = rest.iter().position(|&byte| byte == b'\n').unwrap_or(rest.len());
                    self.0.len() - rest.len() + line
                }
                [b'(', ..] => 1,
                _ => return,
            };
            self.0 = self.0.get(end..).unwrap_or_default();
        }
    }

    fn word(&mut self) -> Option<&'a [u8]> {
        self.skip_space();
        let whole = self.0.iter().take_while(|byte| byte.is_ascii_alphanumeric() || **byte == b'_').count();
        // Anything else is a word of one byte.
        let (word, rest) = self.0.split_at_checked(whole.max(1))?;
        self.0 = rest;
        Some(word)
    }

    fn comma(&mut self) -> bool {
        self.skip_space();
        let found = self.0.first() == Some(&b',');
        if found {
            self.0 = &self.0[1..];
        }
        found
    }

    fn number(&mut self) -> Option<i32> {
        self.skip_space();
        let len = self.0.iter().take_while(|byte| byte.is_ascii_digit() || **byte == b'-').count();
        let (digits, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        let digits = std::str::from_utf8(digits).ok()?;
        // The server prints it signed or unsigned, depending on its version.
        digits.parse::<i32>().ok().or_else(|| digits.parse::<u32>().ok().map(|format| format as i32))
    }

    fn literal(&mut self) -> Option<Vec<u8>> {
        self.skip_space();
        let (body, end, is_hex) = match self.0 {
            [b'X' | b'x', b'\'', rest @ ..] => (rest, rest.iter().position(|&byte| byte == b'\'')?, true),
            [b'0', b'x' | b'X', rest @ ..] => {
                (rest, rest.iter().take_while(|byte| byte.is_ascii_hexdigit()).count(), true)
            }
            [quote @ (b'\'' | b'"'), rest @ ..] => (rest, rest.iter().position(|byte| byte == quote)?, false),
            _ => return None,
        };
        let (content, rest) = body.split_at_checked(end)?;
        self.0 = match rest {
            [b'\'' | b'"', rest @ ..] => rest,
            rest => rest,
        };
        if !is_hex {
            return Some(content.to_vec());
        }
        let digit = |byte: u8| char::from(byte).to_digit(16).map(|digit| digit as u8);
        let pairs = content.chunks(2);
        pairs.map(|pair| Some(digit(*pair.first()?)? << 4 | digit(*pair.get(1)?)?)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn xid(global: &str, branch: &str, format: i32) -> Xid {
        Xid { format, global: global.into(), branch: branch.into() }
    }

    #[test]
    fn statements_are_told_apart() {
        let cases: &[(&str, Statement)] = &[
            ("BEGIN", Statement::Begin),
            ("COMMIT", Statement::Commit),
            ("ROLLBACK", Statement::Rollback),
            ("ROLLBACK /* added by mysqlbinlog */", Statement::Rollback),
            ("SAVEPOINT `a`", Statement::Savepoint),
            ("ROLLBACK TO `a`", Statement::RollbackToSavepoint),
            ("rollback work to savepoint a", Statement::RollbackToSavepoint),
            ("XA START X'6162',X'63',7", Statement::XaStart(xid("ab", "c", 7))),
            ("XA END X'6162',X'',1", Statement::XaEnd(xid("ab", "", 1))),
            ("XA PREPARE 'ab'", Statement::XaPrepare(xid("ab", "", 1))),
            ("xa commit 'ab' , 0x63, 4294967295", Statement::XaCommit(xid("ab", "c", -1))),
            ("XA ROLLBACK X'6162',X'',1", Statement::XaRollback(xid("ab", "", 1))),
            ("XA RECOVER", Statement::Other),
            ("XA COMMIT X'6'", Statement::XaUnreadable),
            ("CREATE TABLE t (a int)", Statement::Ddl),
            ("/*!40000 ALTER TABLE `t` DISABLE KEYS */", Statement::Ddl),
            ("create /* why */ or replace temporary table t (a int)", Statement::Ddl),
            ("ALTER ONLINE IGNORE TABLE t ADD b int", Statement::Ddl),
            ("DROP TABLE `t` /* generated by server */", Statement::Ddl),
            ("DROP DATABASE d", Statement::Ddl),
            ("TRUNCATE t", Statement::Ddl),
            ("RENAME TABLE a TO b", Statement::Ddl),
            ("# c\n-- d\nINSERT INTO t VALUES (1)", Statement::Change),
            ("GRANT ALL ON t TO u", Statement::Other),
            ("CREATE USER u", Statement::Other),
            ("FLUSH TABLES", Statement::Other),
            ("", Statement::Other),
        ];
        for (sql, expected) in cases {
            assert_eq!(&classify(sql.as_bytes()), expected, "{sql}");
        }
    }

    #[test]
    fn an_xid_prints_as_the_server_logs_it() {
        assert_eq!(xid("ab", "", 1).to_string(), "X'6162',X'',1");
    }

    #[test]
    fn a_table_is_found_in_every_spelling() {
        for sql in
            ["alter table outbox add b int", "DROP TABLE `d`.`Outbox`", "RENAME TABLE a TO outbox", "truncate d.outbox"]
        {
            assert!(mentions(sql.as_bytes(), "outbox"), "{sql}");
        }
        for sql in ["alter table outbox2 add b int", "drop table my_outbox", "create table x (y int)", ""] {
            assert!(!mentions(sql.as_bytes(), "outbox"), "{sql}");
        }
        assert!(mentions("drop table `my outbox!`".as_bytes(), "my outbox!"));
    }

    proptest! {
        #[test]
        fn arbitrary_statements_never_panic(sql: Vec<u8>, table: String) {
            let _ = classify(&sql);
            let _ = mentions(&sql, &table);
            let _ = classify(&[b"XA COMMIT ".as_slice(), &sql].concat());
        }

        #[test]
        fn a_printed_xid_reads_back(format: i32, global: Vec<u8>, branch: Vec<u8>) {
            let xid = Xid { format, global, branch };
            prop_assert_eq!(classify(format!("XA COMMIT {xid}").as_bytes()), Statement::XaCommit(xid));
        }
    }
}
