//! What the poller knows of a layout's tables, whatever the database.

use std::collections::HashMap;
use std::time::Duration;

use crate::config::{MarkSettings, PollSettings, RouteSettings};
use crate::route::layout::{Kind, Layout, Role};
use crate::route::polling::{PUBLISHED_COLUMN, Polling};

/// The names of a table's columns, and what is set in them.
#[derive(Clone, Debug)]
pub struct View {
    pub scheme: &'static Polling,
    pub id: String,
    /// The column that groups rows; `None` where it is none of its own, so that a row that waits stops its table.
    pub key: Option<String>,
    /// The order of rows, with the id last.
    pub order: Vec<String>,
    pub most: u32,
    pub lease: Duration,
    /// Rows that are claimed at once.
    pub batch: usize,
    pub worker: String,
    renamed: Vec<(&'static str, String)>,
    /// Documents of this layout are in camel case.
    camel: bool,
    /// The columns that a table must have besides those of its records.
    needed: Vec<String>,
}

impl View {
    /// For polling.
    pub fn of(settings: &PollSettings, route: &RouteSettings, kind: Kind) -> Self {
        let mut view = View::new(settings.scheme, settings.patience.most, route, kind);
        (view.lease, view.batch) = (settings.lease, settings.batch);
        view.worker.clone_from(&settings.worker);
        let own = settings.scheme.columns().into_iter().map(|column| view.name(column));
        view.needed = own.chain(view.order.iter().cloned()).chain(view.key.clone()).collect();
        view.needed.sort_unstable();
        view.needed.dedup();
        view
    }

    /// For writing back what was delivered from the log.
    pub fn of_marks(settings: &MarkSettings, route: &RouteSettings, kind: Kind) -> Self {
        let mut view = View::new(settings.scheme, settings.most, route, kind);
        view.needed = settings.scheme.marks().into_iter().map(|column| view.name(column)).collect();
        view
    }

    fn new(scheme: &'static Polling, most: u32, route: &RouteSettings, kind: Kind) -> Self {
        let layout = Layout::named(&route.layout);
        let mut renamed = Vec::new();
        for (name, role) in Role::ALL {
            let chosen = route.columns.iter().rev().find(|(of, _)| of == name).map(|(_, column)| column.clone());
            let own = layout.and_then(|layout| layout.column(role)).map(|(column, _)| column);
            let own = if role == Role::Published { Some(PUBLISHED_COLUMN) } else { own };
            if let (Some(own), Some(chosen)) = (own, chosen) {
                renamed.push((own, chosen));
            }
        }
        let camel = kind == Kind::Mongo && route.layout == "message-group";
        let mut view = View {
            scheme,
            id: String::new(),
            key: None,
            order: Vec::new(),
            most,
            lease: scheme.lease,
            batch: scheme.batch,
            worker: String::new(),
            renamed,
            camel,
            needed: Vec::new(),
        };
        let column_of = |role| layout.and_then(|layout| layout.column(role)).map(|(column, _)| column);
        view.id = column_of(Role::Id).map(|column| view.name(column)).unwrap_or_default();
        // A key that was chosen where the layout has none is a column as well.
        let chosen = route.columns.iter().rev().find(|(of, _)| of == "key").map(|(_, column)| column.clone());
        let key = chosen.or_else(|| column_of(Role::Key).map(|column| view.name(column)));
        view.key = key.filter(|column| !column.starts_with('/'));
        let order = if kind == Kind::Mongo { scheme.document_order } else { scheme.order };
        view.order = order.iter().map(|column| view.name(column)).collect();
        let id = if kind == Kind::Mongo && view.id.is_empty() { "_id".to_owned() } else { view.id.clone() };
        view.order.push(id);
        view
    }

    /// What a column of the layout is called here.
    pub fn name(&self, column: &str) -> String {
        if let Some((_, chosen)) = self.renamed.iter().find(|(own, chosen)| *own == column && !chosen.starts_with('/'))
        {
            return chosen.clone();
        }
        if self.camel { camel(column) } else { column.to_owned() }
    }

    /// The order of rows that are not marked, as SQL writes it, where the table has the columns for it. Of a group whose rows
    /// have an order of their own, none comes before one that it follows, whatever their times say.
    pub fn sql_order(&self, has: impl Fn(&str) -> bool, quote: impl Fn(&str) -> String) -> Option<String> {
        if self.scheme.order.is_empty() || !self.order.iter().all(|column| has(column)) {
            return None;
        }
        let quoted: Vec<_> = self.order.iter().map(|column| quote(column)).collect();
        let Some((group, version)) = self.scheme.within.map(|(group, version)| (self.name(group), self.name(version)))
        else {
            return Some(quoted.join(", "));
        };
        let (first, version, id) = (&quoted[0], quote(&version), &quoted[quoted.len() - 1]);
        let latest = format!(
            "max({first}) OVER (PARTITION BY {} ORDER BY {version}, {id} ROWS UNBOUNDED PRECEDING)",
            quote(&group)
        );
        Some(format!("{latest}, {version}, {id}"))
    }

    /// The columns that a table must have besides those of its records.
    pub fn needed(&self) -> &[String] {
        &self.needed
    }
}

/// What a status column of the layout is called in documents.
pub fn document_name(route: &RouteSettings, column: &str) -> String {
    if route.layout == "message-group" { camel(column) } else { column.to_owned() }
}

fn camel(column: &str) -> String {
    let mut name = String::new();
    let mut upper = false;
    for c in column.chars() {
        match c {
            '_' => upper = true,
            c if upper => {
                name.push(c.to_ascii_uppercase());
                upper = false;
            }
            c => name.push(c),
        }
    }
    name
}

/// A refusal in a word, as Kafka names its errors.
pub fn code(why: &str) -> &str {
    let known = [
        ("takes", "MSG_SIZE_TOO_LARGE"),
        ("larger than", "MSG_SIZE_TOO_LARGE"),
        ("too large", "MSG_SIZE_TOO_LARGE"),
        ("Unknown topic", "UNKNOWN_TOPIC_OR_PART"),
        ("does not exist", "UNKNOWN_TOPIC_OR_PART"),
        ("uthoriz", "TOPIC_AUTHORIZATION_FAILED"),
        ("not a name Kafka takes", "INVALID_TOPIC_EXCEPTION"),
        ("topic is null", "INVALID_TOPIC_EXCEPTION"),
        ("nvalid record", "INVALID_RECORD"),
    ];
    known.iter().find(|(part, _)| why.contains(part)).map_or(why, |(_, name)| name)
}

/// How many keys a statement may leave out; with more, the table waits.
pub const MOST_KEYS: usize = 1000;

/// The places of rows in the order that they are delivered in: as they came, but those of a group among themselves by
/// their version.
pub fn by_version(rows: &[(Vec<u8>, i64)]) -> Vec<usize> {
    let mut places: HashMap<&[u8], Vec<usize>> = HashMap::new();
    for (at, (group, _)) in rows.iter().enumerate() {
        places.entry(group).or_default().push(at);
    }
    let mut order: Vec<usize> = (0..rows.len()).collect();
    for places in places.values() {
        let mut sorted = places.clone();
        sorted.sort_by_key(|at| rows[*at].1);
        for (place, row) in places.iter().zip(sorted) {
            order[*place] = row;
        }
    }
    order
}

/// How many characters a type such as `varchar(255)` takes; `None` for any number.
pub fn most_characters(kind: &str) -> Option<usize> {
    let (name, rest) = kind.split_once('(')?;
    name.contains("char").then(|| rest.split_once(')')?.0.parse().ok())?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_a_group_are_in_the_order_of_their_versions() {
        let rows = [("a", 2), ("b", 1), ("a", 1), ("b", 2), ("a", 3)];
        let rows: Vec<_> = rows.iter().map(|(group, version)| (group.as_bytes().to_vec(), *version)).collect();
        assert_eq!(by_version(&rows), [2, 1, 0, 3, 4]);
    }

    #[test]
    fn a_type_tells_how_many_characters_it_takes() {
        assert_eq!(most_characters("character varying(255)"), Some(255));
        assert_eq!(most_characters("varchar(20)"), Some(20));
        assert_eq!((most_characters("text"), most_characters("numeric(10)")), (None, None));
    }
}
