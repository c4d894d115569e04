//! The syntax of a connection URL, apart from its meaning: `postgres://user:password@host:port,host:port/db?key=value`
//! becomes a list of libpq's keywords and their values. Nothing of the text appears in an error, since any part of a
//! mistyped URL may be its password.

/// What is wrong with the text, without the text.
pub(super) type Malformed = String;

/// The keywords in the order libpq would store them; a later one replaces an earlier one of the same name.
pub(super) fn keywords(url: &str) -> Result<Vec<(String, String)>, Malformed> {
    let rest = url
        .strip_prefix("postgres://")
        .or_else(|| url.strip_prefix("postgresql://"))
        .ok_or("a PostgreSQL address begins with postgres:// or postgresql://")?;
    let mut found = Vec::new();
    let rest = match userinfo_end(rest) {
        Some(end) => {
            let (user, password) = match rest[..end].split_once(':') {
                Some((user, password)) => (user, Some(password)),
                None => (&rest[..end], None),
            };
            found.push(("user".to_owned(), decode(user, "the user name")?));
            if let Some(password) = password {
                found.push(("password".to_owned(), decode(password, "the password")?));
            }
            &rest[end + 1..]
        }
        None => rest,
    };
    let (rest, query) = match rest.split_once('?') {
        Some((rest, query)) => (rest, Some(query)),
        None => (rest, None),
    };
    let (hosts, database) = match rest.split_once('/') {
        Some((hosts, database)) => (hosts, Some(database)),
        None => (rest, None),
    };
    if !hosts.is_empty() {
        let (mut names, mut ports) = (Vec::new(), Vec::new());
        for host in hosts.split(',') {
            let (name, port) = host_and_port(host)?;
            names.push(decode(name, "a host name")?);
            ports.push(port.to_owned());
        }
        found.push(("host".to_owned(), names.join(",")));
        if ports.iter().any(|port| !port.is_empty()) {
            found.push(("port".to_owned(), ports.join(",")));
        }
    }
    if let Some(database) = database.filter(|name| !name.is_empty()) {
        found.push(("dbname".to_owned(), decode(database, "the database name")?));
    }
    for pair in query.unwrap_or_default().split('&').filter(|pair| !pair.is_empty()) {
        let (key, value) =
            pair.split_once('=').ok_or("a parameter after the ? of the address has no = and no value")?;
        let key = decode(key, "a parameter's name")?;
        let value = decode(value, &format!("the value of `{key}`"))?;
        found.push((key, value));
    }
    Ok(found)
}

/// Where the `@` after the credentials is. As in libpq they end at the first `/`, with one exception: the slashes of
/// `user:file:/run/secrets/password@host` need no escaping.
fn userinfo_end(rest: &str) -> Option<usize> {
    let colon = rest.find([':', '@', '/', '?']).filter(|&at| rest[at..].starts_with(":file:"));
    let from = colon.map_or(0, |at| at + ":file:".len());
    let stop = if colon.is_some() { "@?" } else { "@/" };
    rest[from..]
        .find(|c| stop.contains(c))
        .map(|at| from + at)
        .filter(|&at| rest[at..].starts_with('@') && !rest.starts_with('?'))
}

fn host_and_port(host: &str) -> Result<(&str, &str), Malformed> {
    if let Some(bracketed) = host.strip_prefix('[') {
        let (address, after) = bracketed.split_once(']').ok_or("an IPv6 address has no closing bracket")?;
        if address.parse::<std::net::Ipv6Addr>().is_err() {
            return Err("what is in brackets is not an IPv6 address".to_owned());
        }
        return match after.strip_prefix(':') {
            Some(port) => Ok((address, port)),
            None if after.is_empty() => Ok((address, "")),
            None => Err("an IPv6 address is followed by something else than a port".to_owned()),
        };
    }
    match host.split_once(':') {
        Some((_, port)) if port.contains(':') => Err("an IPv6 address must be in brackets: [::1]".to_owned()),
        Some((name, port)) => Ok((name, port)),
        None => Ok((host, "")),
    }
}

/// Percent-decoding as libpq does it: `+` stays a plus, a NUL is refused.
fn decode(text: &str, what: &str) -> Result<String, Malformed> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&first, after)) = rest.split_first() {
        if first != b'%' {
            bytes.push(first);
            rest = after;
            continue;
        }
        let byte = after
            .get(..2)
            .filter(|digits| digits.iter().all(u8::is_ascii_hexdigit))
            .and_then(|digits| std::str::from_utf8(digits).ok())
            .and_then(|digits| u8::from_str_radix(digits, 16).ok())
            .ok_or_else(|| {
                format!("{what} has a % that is not followed by two hexadecimal digits (write %25 for a %)")
            })?;
        if byte == 0 {
            return Err(format!("{what} has a %00, which PostgreSQL does not take"));
        }
        bytes.push(byte);
        rest = &after[2..];
    }
    String::from_utf8(bytes).map_err(|_| format!("{what} is not UTF-8"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(url: &str) -> Vec<(String, String)> {
        keywords(url).unwrap()
    }

    fn pairs(expected: &[(&str, &str)]) -> Vec<(String, String)> {
        expected.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn every_part_of_a_url_is_found_and_decoded() {
        assert_eq!(
            found("postgresql://al%40ice:p%3Aw%2F@h1:5432,[::1]:5433,h3/my%20db?sslmode=require&options=-c%20a%3Db"),
            pairs(&[
                ("user", "al@ice"),
                ("password", "p:w/"),
                ("host", "h1,::1,h3"),
                ("port", "5432,5433,"),
                ("dbname", "my db"),
                ("sslmode", "require"),
                ("options", "-c a=b"),
            ])
        );
        assert_eq!(found("postgres://"), []);
        assert_eq!(found("postgres:///db?host=/tmp/a"), pairs(&[("dbname", "db"), ("host", "/tmp/a")]));
        assert_eq!(found("postgres://%2Frun%2Fpg/db"), pairs(&[("host", "/run/pg"), ("dbname", "db")]));
        assert_eq!(found("postgres://u:p?w@h"), pairs(&[("user", "u"), ("password", "p?w"), ("host", "h")]));
        assert_eq!(found("postgres://?user=a@b"), pairs(&[("user", "a@b")]));
        assert_eq!(found("postgres://u@h"), pairs(&[("user", "u"), ("host", "h")]));
    }

    #[test]
    fn a_password_file_may_be_written_plainly_or_encoded() {
        for url in ["postgres://u:file:/run/pw@h/db", "postgres://u:file%3A%2Frun%2Fpw@h/db"] {
            assert_eq!(
                found(url),
                pairs(&[("user", "u"), ("password", "file:/run/pw"), ("host", "h"), ("dbname", "db")])
            );
        }
        assert_eq!(found("postgres://u:env:PW@h")[1].1, "env:PW");
    }

    #[test]
    fn malformed_urls_are_refused_without_being_repeated() {
        for url in [
            "mysql://u:hunter2@h",
            "postgres://u:hunter2%@h",
            "postgres://u:hunter2%zz@h",
            "postgres://u:hunter2%00@h",
            "postgres://u:hunter2@[::1",
            "postgres://u:hunter2@[nonsense]",
            "postgres://u:hunter2@[::1]5432",
            "postgres://u:hunter2@::1/db",
            "postgres://u:hunter2@h?sslmode",
            "postgres://u:hunter2%ff@h",
        ] {
            let message = keywords(url).unwrap_err();
            assert!(!message.contains("hunter2"), "{message}");
        }
    }
}
